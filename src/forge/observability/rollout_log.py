"""`rollouts.jsonl`: what the model said, with rewards; one JSON object for each episode."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from forge.observability.files import JsonLines
from forge.types import Episode, Group

Kind = Literal["train", "eval"]
Outcome = Literal["trained", "zero_variance", "too_old", "failed", "nonfinite"]
"""What became of a group: all but the first are not trained. Zero variance: no episode was better than another; failed:
too few episodes had a reward; nonfinite: its batch made a NaN."""
LONGEST_TEXT = 20_000
"""Characters of a prompt or response that are kept; a longer one is cut in the middle and says so."""


class RolloutLog:
    """Writes episodes as they are trained on or evaluated.

    Args:
        path: usually `<output_dir>/rollouts.jsonl`.
        resume_step: the step a resumed run continues from, None for a new run; see `JsonLines`.
        per_step: how many episodes of a step to keep; None keeps all. Whole groups are kept, the first ones.

    Example:
        >>> log = RolloutLog(run / "rollouts.jsonl")
        >>> log.write(3, [group])
        >>> json.loads((run / "rollouts.jsonl").read_text().splitlines()[0])
        {"step": 3, "kind": "train", "outcome": "trained", "group": 17, "sample": "chain_sum-5", "epoch": 0,
         "prompt": "...", "response": "<answer>4</answer>", "target": "4", "reward": 1, "rewards": {"MathReward": 1},
         "advantage": 0.5, "version": 2, "version_max": 3, "tokens": 7, "finish_reason": "stop"}

    It is the ledger of the run: every group that was started and finished is in it, under one step, with its outcome.
    A group of which no episode is left has one line without a response.
    """

    def __init__(self, path: Path, *, resume_step: int | None = None, per_step: int | None = None) -> None:
        self._lines = JsonLines(path, resume_step=resume_step)
        self._per_step = per_step

    def write(
        self, step: int, groups: Sequence[Group], *, kind: Kind = "train", outcome: Outcome | None = None
    ) -> None:
        """Adds the episodes of `groups`; `step` is the one that trains them, or after which they are judged.

        `outcome` is what became of all of them; None tells trained and zero_variance apart by their advantages.
        """
        written = 0
        for group in groups:
            if self._per_step is not None and written + len(group.episodes) > self._per_step:
                return
            written += len(group.episodes)
            head: dict[str, object] = {"step": step, "kind": kind}
            if kind == "train":
                head["outcome"] = outcome or ("trained" if group.has_signal else "zero_variance")
            head |= {"group": group.id, "sample": group.sample_id, "epoch": group.epoch}
            for episode in group.episodes:
                self._lines.write(head | _record(episode))
            if not group.episodes:
                self._lines.write(head)

    def rewind(self, resume_step: int | None) -> None:
        """Drops what belongs to later steps: the run goes on from that step."""
        self._lines.rewind(resume_step)

    def flush_to_disk(self) -> None:
        """Returns when what was written would survive the machine."""
        self._lines.flush_to_disk()

    def close(self) -> None:
        self._lines.close()


def _record(episode: Episode) -> dict[str, object]:
    return {
        "prompt": _bounded(episode.prompt),
        "response": _bounded(episode.response),
        "target": _bounded(episode.target),
        "reward": episode.reward,
        "rewards": episode.rewards,
        "advantage": episode.advantage,
        "version": episode.policy_version,
        "version_max": episode.policy_version_max,
        "tokens": len(episode.response_ids),
        "finish_reason": episode.finish_reason,
    }


def _bounded(text: str) -> str:
    if len(text) <= LONGEST_TEXT:
        return text
    half = LONGEST_TEXT // 2
    return f"{text[:half]} […{len(text) - 2 * half} characters left out…] {text[-half:]}"
