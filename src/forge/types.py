"""What travels between the stages: a completion becomes an episode, episodes of one prompt become a group."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Completion:
    """One sampled answer of the generator.

    Attributes:
        text: the answer as text, for people and rewards; never tokenized again.
        token_ids: the sampled tokens, the end-of-turn token included where one was sampled.
        logprobs: one for each token, nats, under the distribution that was sampled from (temperature applied).
        metadata: `policy_version` (the oldest weights that wrote one of the tokens), `policy_version_max`,
            `finish_reason` ("stop", "length" or "abort").

    Example:
        >>> metadata = {"policy_version": 3, "policy_version_max": 3, "finish_reason": "stop"}
        >>> Completion(text="4", token_ids=[52], logprobs=[-0.1], metadata=metadata)
    """

    text: str
    token_ids: list[int]
    logprobs: list[float]
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class Episode:
    """A prompt, the answer to it, and everything that training needs to know about the answer."""

    prompt: str
    """The rendered prompt, chat template included."""
    response: str
    target: str
    """What the rewards compare the response with."""
    prompt_ids: list[int]
    response_ids: list[int]
    generator_logprobs: list[float]
    """[len(response_ids)] nats, recorded while sampling."""
    response_mask: list[bool]
    """[len(response_ids)] True where the policy wrote the token, False where an environment did."""
    reward: float = 0.0
    """The weighted sum that is trained on."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Each reward by its name, unweighted."""
    advantage: float = 0.0
    ref_logprobs: list[float] | None = None
    """[len(response_ids)] nats under the reference, or None where there is none."""
    policy_version: int = 0
    """The oldest weights that wrote one of the tokens, in optimizer steps."""
    policy_version_max: int = 0
    finish_reason: str = "stop"


@dataclass(kw_only=True, slots=True)
class Group:
    """The episodes of one prompt; advantages are relative to one another."""

    id: int
    """The order in which groups were started, counted from 0 over the whole run."""
    sample_id: str
    """Which problem of the data set."""
    episodes: list[Episode]
    epoch: int = 0
    """In which pass over the data set, counted from 0."""

    @property
    def policy_version(self) -> int:
        """The oldest weights that wrote one of the group's tokens."""
        return min(e.policy_version for e in self.episodes)

    @property
    def has_signal(self) -> bool:
        """Whether any episode is better or worse than another; without that there is nothing to learn."""
        return any(e.advantage != 0.0 for e in self.episodes)


class UserError(ValueError):
    """The user's input is wrong. The message is complete; an app prints it without a traceback and exits with 2."""
