"""Says when a run goes wrong while it can still be mended: collapsed entropy, runaway KL, engines that disagree."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class HealthLimits:
    """When to warn. A limit must be passed on `patience` steps in a row."""

    patience: int = 3
    entropy_share: float = 0.1
    """Entropy below this share of what the run started with, while the reward is not near its best, is collapse."""
    entropy_floor: float = 0.02
    """Nats; above it entropy is never called collapsed, and below it a run starts no comparison."""
    kl: float = 0.5
    """Nats per token to the reference; runs that learn well stay well below 0.1."""
    mismatch: float = 0.1
    """Nats; bfloat16 alone gives 0.03 to 0.04."""
    zero_variance_share: float = 0.9
    """Share of groups in which all episodes got the same reward."""


class HealthMonitor:
    """Looks at each step's metrics and returns the warnings that are due, each once until it has passed.

    Example:
        >>> monitor = HealthMonitor()
        >>> for _ in range(3): warnings = monitor.check({"kl/ref": 2.0})
        >>> warnings
        ['KL to the reference has been above 0.5 nats ...']
    """

    def __init__(self, limits: HealthLimits | None = None) -> None:
        self._limits = limits or HealthLimits()
        self._first_entropy: float | None = None
        self._streak: dict[str, int] = {}

    def check(self, values: Mapping[str, float]) -> list[str]:
        """The warnings that this step's metrics bring up."""
        limits = self._limits
        entropy = values.get("entropy", math.nan)
        if self._first_entropy is None and math.isfinite(entropy):
            self._first_entropy = entropy
        collapsed = entropy < limits.entropy_floor or entropy < limits.entropy_share * (self._first_entropy or 0.0)
        sure_and_right = values.get("reward/mean", 1.0) >= 0.9  # without a reward: fine-tuning, which is to become sure
        trained, flat = values.get("groups/trained", 0.0), values.get("groups/zero_variance", 0.0)
        candidates = {
            "entropy": (
                collapsed and not sure_and_right,
                f"entropy has collapsed to {entropy:.3g} nats (it began at {self._first_entropy or 0.0:.3g}): raise "
                "training.entropy_coef or grpo.clip_high, lower training.learning_rate, or sample at a higher "
                "grpo.temperature.",
            ),
            "kl": (
                values.get("kl/ref", 0.0) > limits.kl,
                f"KL to the reference has been above {limits.kl:g} nats for {limits.patience} steps, now "
                f"{values.get('kl/ref', 0.0):.3g}: raise grpo.beta, or lower training.learning_rate or "
                "training.max_norm.",
            ),
            "mismatch": (
                values.get("mismatch/logprob_diff", 0.0) > limits.mismatch and values.get("policy/staleness", 0.0) == 0,
                f"trainer and generator disagree by {values.get('mismatch/logprob_diff', 0.0):.3g} nats on the same "
                "tokens: compare training.dtype with services.generator.dtype.",
            ),
            "variance": (
                flat > 0 and flat / (flat + trained) > limits.zero_variance_share,
                f"{flat:.0f} of {flat + trained:.0f} groups have the same reward in every episode, so there is little "
                "to learn from: choose easier or harder problems, raise grpo.n_samples, or a finer-grained reward.",
            ),
        }
        return [text for name, (wrong, text) in candidates.items() if self._due(name, wrong)]

    def _due(self, name: str, wrong: bool) -> bool:
        """True on the step that completes a streak, and not again before the streak has ended."""
        self._streak[name] = self._streak.get(name, 0) + 1 if wrong else 0
        return self._streak[name] == self._limits.patience
