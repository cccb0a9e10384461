"""Says when a run goes wrong while it can still be mended: collapsed entropy, runaway KL, engines that disagree.

What is done about it, and from which bound on, is the config's `guards` section.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forge.config.sections import GuardsConfig

BOUNDS = {"entropy": 0.1, "kl": 0.5, "mismatch": 0.1, "constant_reward": 0.9, "truncated": 0.99}
"""The guards' own bounds; the meaning of each stands in `GuardsConfig`."""
ENTROPY_FLOOR = 0.02
"""Nats; entropy below it counts as collapsed whatever it began with."""
LEARNED = 0.9
"""A mean reward from which on a policy may be sure, and its groups alike: it is right."""


class GuardStop(RuntimeError):
    """A guard that is set to stop the run has seen its bound passed."""


@dataclass(frozen=True, slots=True)
class _Finding:
    wrong: bool
    text: str


class HealthMonitor:
    """Looks at each step's metrics.

    Example:
        >>> monitor = HealthMonitor()
        >>> for _ in range(3): warnings = monitor.check({"kl/ref": 2.0})
        >>> warnings
        ['guards.kl: KL to the reference has been above 0.5 nats for 3 steps, now 2: ...']
    """

    def __init__(self, guards: GuardsConfig | None = None) -> None:
        self._guards = guards or GuardsConfig()
        self._first_entropy: float | None = None
        self._streak: dict[str, int] = {}

    def check(self, values: Mapping[str, float]) -> list[str]:
        """The warnings that this step's metrics bring up, each once until it has passed.

        Raises:
            GuardStop: a guard is due whose action is stop.
        """
        entropy = values.get("entropy", math.nan)
        if self._first_entropy is None and math.isfinite(entropy):
            self._first_entropy = entropy
        due = []
        for name, finding in self._findings(values).items():
            guard = getattr(self._guards, name)
            self._streak[name] = self._streak.get(name, 0) + 1 if finding.wrong else 0
            if guard.action == "ignore" or self._streak[name] != self._guards.patience:
                continue
            if guard.action == "stop":
                raise GuardStop(f"guards.{name} is set to stop: {finding.text}")
            due.append(f"guards.{name}: {finding.text}")
        return due

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs in order to judge as this one would."""
        return {"first_entropy": self._first_entropy, "streak": dict(self._streak)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state_dict()`."""
        self._first_entropy, self._streak = state["first_entropy"], dict(state["streak"])

    def _bound(self, name: str) -> float:
        bound = getattr(self._guards, name).bound
        return BOUNDS[name] if bound is None else float(bound)

    def _findings(self, values: Mapping[str, float]) -> dict[str, _Finding]:
        began = self._first_entropy or 0.0
        entropy, kl = values.get("entropy", math.nan), values.get("kl/ref", 0.0)
        mismatch, truncated = values.get("mismatch/logprob_diff", 0.0), values.get("completion/truncated_frac", 0.0)
        trained, flat = values.get("groups/trained", 0.0), values.get("groups/zero_variance", 0.0)
        reward = values.get("reward/mean")  # None: fine-tuning, which is to become sure
        learned = reward is not None and reward >= LEARNED
        steps = self._guards.patience
        return {
            "entropy": _Finding(
                entropy < max(ENTROPY_FLOOR, self._bound("entropy") * began) and reward is not None and not learned,
                f"entropy has collapsed to {entropy:.3g} nats (it began at {began:.3g}): raise training.entropy_coef "
                "or grpo.clip_high, lower training.learning_rate, or sample at a higher grpo.temperature.",
            ),
            "kl": _Finding(
                kl > self._bound("kl"),
                f"KL to the reference has been above {self._bound('kl'):g} nats for {steps} steps, now {kl:.3g}: raise "
                "grpo.beta, or lower training.learning_rate or training.max_norm.",
            ),
            "mismatch": _Finding(
                mismatch > self._bound("mismatch") and values.get("policy/staleness", 0.0) == 0,
                f"trainer and generator disagree by {mismatch:.3g} nats on the same tokens, more than "
                f"{self._bound('mismatch'):g}: compare training.dtype with services.generator.dtype.",
            ),
            "constant_reward": _Finding(
                flat > 0 and flat / (flat + trained) > self._bound("constant_reward") and not learned,
                f"{flat:.0f} of {flat + trained:.0f} groups have the same reward in every episode, for {steps} steps: "
                "there is little to learn from: choose easier or harder problems, raise grpo.n_samples, or use a "
                "finer-grained reward.",
            ),
            "truncated": _Finding(
                truncated > self._bound("truncated") and not learned,
                f"{truncated:.0%} of the completions were cut off at grpo.max_new_tokens for {steps} steps, so most "
                "answers were never finished: raise grpo.max_new_tokens and training.seq_len, ask for shorter answers, "
                "or set grpo.overlong_buffer.",
            ),
        }
