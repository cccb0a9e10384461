"""Every name that may stand in `metrics.jsonl`, with its meaning and unit.

The names are a promise to users: dashboards and scripts read them. `tests/unit/observability` holds that those of the
contract are here, and the tests of the programs that every name a run writes is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["mean", "sum", "max", "last"]


@dataclass(frozen=True, slots=True)
class MetricInfo:
    """What one name means."""

    meaning: str
    unit: str
    """Empty for a plain number."""
    kind: Kind = "mean"
    """How the values recorded within one step become one."""


CATALOGUE: dict[str, MetricInfo] = {
    "step": MetricInfo("optimizer steps done", "steps", "last"),
    "loss": MetricInfo("the loss of the whole batch, entropy bonus included", "", "last"),
    "reward/mean": MetricInfo("weighted reward, over all episodes that were sampled", ""),
    "reward/std": MetricInfo("its standard deviation over the same episodes", ""),
    "reward/<RewardName>": MetricInfo("one reward alone, unweighted, same episodes", ""),
    "kl/ref": MetricInfo("KL(policy || reference), k3 estimate, mean over trained tokens", "nats"),
    "kl/<estimator>": MetricInfo("the same by another estimator: k1, k2, k3", "nats"),
    "entropy": MetricInfo("entropy of the policy at the sampling temperature, mean over trained tokens", "nats"),
    "ratio/mean": MetricInfo("policy probability over that of the sampling policy, mean over trained tokens", ""),
    "ratio/max": MetricInfo("the largest of these", "", "max"),
    "ratio/clipped_frac": MetricInfo("share of trained tokens whose gradient the loss clips", ""),
    "ratio/clipped_<side>_frac": MetricInfo("the same for one side of the clip range: low, high", ""),
    "correction/<name>": MetricInfo("importance correction of the sampling mismatch: weights, dropped tokens", ""),
    "loss/<term>": MetricInfo("one term of the loss, or a diagnostic of it", ""),
    "grad_norm": MetricInfo("L2 norm of the gradient before clipping", "", "last"),
    "lr": MetricInfo("learning rate of the step", "", "last"),
    "completion/mean_len": MetricInfo("length of the completions", "tokens"),
    "completion/truncated_frac": MetricInfo("share of completions cut off at grpo.max_new_tokens", ""),
    "policy/staleness": MetricInfo("steps from the weights that sampled a trained episode to its training", "steps"),
    "policy/staleness_max": MetricInfo("the largest of these", "steps", "max"),
    "policy/version": MetricInfo("weights version that the generators had when the step ended", "steps", "last"),
    "mismatch/logprob_diff": MetricInfo(
        "mean |trainer - generator| log-probability of trained tokens; at staleness 0 it is the engines' alone", "nats"
    ),
    "groups/<outcome>": MetricInfo(
        "groups by outcome: trained, zero_variance, too_old, failed, nonfinite", "groups", "sum"
    ),
    "episodes/<outcome>": MetricInfo("episodes by outcome: failed, aborted", "episodes", "sum"),
    "tokens/<outcome>": MetricInfo(
        "tokens by outcome: trained, dropped (by the importance correction)", "tokens", "sum"
    ),
    "prompts/<outcome>": MetricInfo("problems of the data set by outcome: too_long", "prompts", "sum"),
    "documents/<outcome>": MetricInfo(
        "samples of fine-tuning by outcome, so far: truncated, too_long, nothing_trained, held_out", "samples", "last"
    ),
    "data/epoch": MetricInfo("passes over the (first) data set so far", "epochs", "last"),
    "buffer/<state>": MetricInfo("groups in the replay buffer when the step began: waiting, running", "groups", "last"),
    "throughput/episodes_per_s": MetricInfo("episodes trained, per second of the whole step", "1/s", "last"),
    "throughput/documents_per_s": MetricInfo("samples of fine-tuning, per second of the whole step", "1/s", "last"),
    "throughput/train_tokens_per_s": MetricInfo(
        "tokens trained on, shared prompts once, per second of training", "1/s", "last"
    ),
    "throughput/generate_tokens_per_s": MetricInfo("tokens sampled, per second of the whole step", "1/s", "last"),
    "throughput/mfu": MetricInfo(
        "useful floating-point operations of training, over what matrix products alone reach in the same seconds",
        "",
        "last",
    ),
    "time/step": MetricInfo("from one step's end to the next", "s", "sum"),
    "time/wait_rollouts": MetricInfo("the trainer waited for groups", "s", "sum"),
    "time/trainer_idle": MetricInfo("share of the step in which the trainer waited for groups", "", "last"),
    "time/generator_idle": MetricInfo(
        "share of the step in which the generators had no request (their mean)", "", "last"
    ),
    "time/train": MetricInfo("forward, backward and optimizer", "s", "sum"),
    "time/push_weights": MetricInfo("the trainer published the new weights", "s", "sum"),
    "time/pull_weights": MetricInfo("the generators took them over", "s", "sum"),
    "time/generate": MetricInfo("the generators computed (their mean), at any time in the step", "s", "sum"),
    "time/generate_while_training": MetricInfo("of that, while the trainer trained: the two overlap", "s", "sum"),
    "time/<part>": MetricInfo("another part of the step, which may overlap with the rest", "s", "sum"),
    "services/<name>/healthy": MetricInfo("replicas of the service that take requests", "replicas", "last"),
    "services/<name>/restarts": MetricInfo("replicas replaced since the run was started", "restarts", "last"),
    "services/<name>/in_flight": MetricInfo("requests sent to the service and not yet answered", "requests", "last"),
    "services/<name>/retried": MetricInfo("requests that were sent again after a death, so far", "requests", "last"),
    "memory/<place>": MetricInfo("largest memory use so far", "GiB", "max"),
    "eval/reward": MetricInfo("weighted reward on held-out problems, greedy decoding", "", "last"),
    "eval/accuracy": MetricInfo("share of held-out problems answered right, greedy decoding", "", "last"),
    "eval/loss": MetricInfo("loss on held-out samples (supervised fine-tuning)", "nats", "last"),
    "eval/perplexity": MetricInfo("exp(eval/loss)", "", "last"),
    "eval/token_accuracy": MetricInfo("share of held-out trained tokens that the model ranks first", "", "last"),
    "eval/tokens": MetricInfo("held-out trained tokens", "tokens", "last"),
    "eval/samples": MetricInfo("how many held-out problems or samples", "problems", "last"),
    "eval/mean_len": MetricInfo("length of the held-out completions", "tokens", "last"),
    "eval/truncated_frac": MetricInfo("share of them cut off", "", "last"),
    "eval/seconds": MetricInfo("how long the evaluation took", "s", "last"),
    "eval/reward/<RewardName>": MetricInfo("one reward alone on held-out problems", "", "last"),
    "eval/<name>": MetricInfo("another held-out measure", "", "last"),
}


class UnknownMetric(ValueError):
    """A name that the catalogue does not have."""


def describe(name: str) -> MetricInfo:
    """What `name` means.

    Raises:
        UnknownMetric: no entry, and no entry with a placeholder, has this name.

    Example:
        >>> describe("time/train").unit, describe("reward/MathReward").meaning
        ('s', 'one reward alone, unweighted, same episodes')
    """
    exact = CATALOGUE.get(name)
    if exact is not None:
        return exact
    for pattern, info in CATALOGUE.items():
        if "<" in pattern and _matches(pattern, name):
            return info
    raise UnknownMetric(
        f"metric name must be one of forge.observability.catalogue, got {name!r}: add it there with meaning and unit."
    )


def _matches(pattern: str, name: str) -> bool:
    before, _, rest = pattern.partition("<")
    after = rest.partition(">")[2]
    filled = len(name) > len(before) + len(after)
    return filled and name.startswith(before) and name.endswith(after)
