"""The config of GRPO training. The text under a field is what `--help` prints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from forge.config import rules
from forge.config.errors import ConfigError
from forge.config.fields import Count, Fraction, NonNegativeFloat, PositiveFloat, PositiveInt, Range, Reader
from forge.config.sections import DatasetConfig, RunConfig, ServiceConfig, TrainingConfig


@dataclass(kw_only=True, slots=True)
class GRPOTrainingConfig(TrainingConfig):
    sync_interval: PositiveInt = 1
    """Optimizer steps between weight syncs."""
    max_staleness: Count | None = None
    """The most optimizer steps between the weights that sampled an episode and its training; 0 is strictly on-policy,
    null is sync_interval."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus, which keeps the policy from collapsing."""

    @property
    def staleness_bound(self) -> int:
        """`max_staleness`, with null resolved."""
        return self.sync_interval if self.max_staleness is None else self.max_staleness


@dataclass(kw_only=True, slots=True)
class CorrectionConfig:
    level: Literal["token", "sequence"] = "token"
    """Weigh each token by its own ratio, or all tokens of a response by their product."""
    mode: Literal["truncate", "mask"] = "truncate"
    """What happens above the cap: the weight is cut to it, or the token is not trained."""
    cap: Annotated[float, Range(least=1, why="the weight is 1 where the engines agree")] = 2.0
    """The largest weight."""


@dataclass(kw_only=True, slots=True)
class AlgorithmConfig:
    n_samples: Annotated[int, Range(least=2, why="a single sample has no baseline")] = 8
    """Responses to each prompt; together they are a group."""
    clip_low: Annotated[float, Range(least=0, below=1)] | None = None
    """The ratio is clipped below 1 - clip_low; null is the loss's own default."""
    clip_high: Annotated[float, Range(least=0, why="the upper bound 1 + clip_high would fall below 1")] | None = None
    """The ratio is clipped above 1 + clip_high; null is the loss's own default."""
    beta: NonNegativeFloat | None = None
    """Weight of the KL penalty towards the reference; 0 starts no reference model, null is the loss's own default."""
    temperature: PositiveFloat = 1.0
    """Temperature of sampling, and of the scores in the trainer."""
    top_p: Fraction = 1.0
    """Sample from the most likely tokens that hold this much probability. 1 is all, which ratios and KL assume."""
    max_new_tokens: PositiveInt | None = None
    """The most tokens of a response; null is what seq_len leaves after the prompt."""
    advantage: Literal["grpo", "dr_grpo", "rloo"] = "grpo"
    """The baseline: mean and standard deviation of the group, its mean, or the mean of the others."""
    correction: CorrectionConfig | None = None
    """Importance correction of simple_grpo, which has no ratio of its own, for stale or differing weights."""
    dynamic_sampling: bool = False
    """Replace groups whose rewards are all equal by new prompts (DAPO)."""
    max_empty_batches: PositiveInt = 10
    """Batches in a row with nothing to learn from before the run is stopped."""
    overlong_buffer: Count = 0
    """Tokens before max_new_tokens over which a length penalty grows to -1 (DAPO); 0 is off."""
    error_reward: float | None = None
    """The reward of an episode whose reward function failed; null leaves the episode out."""
    max_error_fraction: Annotated[float, Range(least=0, most=1)] = 0.1
    """The run stops when a larger part of the episodes has failed."""


@dataclass(kw_only=True, slots=True)
class LossConfig:
    SHORTHAND: ClassVar[str] = "name"
    name: str = "grpo"
    """simple_grpo, grpo, dr_grpo, dapo, cispo, gspo, sapo, reinforce, or the import path of a class."""
    args: dict[str, Any] = field(default_factory=dict)
    """Arguments of the loss, beyond those of the grpo section."""


@dataclass(kw_only=True, slots=True)
class RewardConfig:
    SHORTHAND: ClassVar[str] = "reward"
    reward: str
    """The import path of a callable (prompt, response, target) -> float, or of a class of such."""
    weight: float = 1.0
    """Its weight in the sum."""
    args: dict[str, Any] = field(default_factory=dict)
    """Arguments of the class."""


@dataclass(kw_only=True, slots=True)
class GeneratorServiceConfig(ServiceConfig):
    """Its `procs` is the tensor-parallel degree of vLLM."""

    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """What to generate in; auto is as the trainer."""
    max_num_seqs: PositiveInt = 256
    """Sequences that are decoded at the same time."""
    gpu_memory_utilization: Fraction = 0.9
    """The part of a GPU's memory that weights and KV cache may take."""


@dataclass(kw_only=True, slots=True)
class PolicyGeneratorConfig(GeneratorServiceConfig):
    """The generator that samples what the trainer learns from."""

    colocate: bool | None = None
    """Take turns with the trainer on its devices: sleep, and free their memory, while it takes a step. null: where
    training.max_staleness is 0 and there is one device for both, the CPU or a single GPU."""


@dataclass(kw_only=True, slots=True)
class RewardServiceConfig(ServiceConfig):
    with_gpus: bool = False
    """true gives every process a GPU, for rewards that run a model."""


@dataclass(kw_only=True, slots=True)
class GRPOServices:
    generator: PolicyGeneratorConfig = field(default_factory=PolicyGeneratorConfig)
    trainer: ServiceConfig = field(default_factory=ServiceConfig)
    reward: RewardServiceConfig = field(default_factory=RewardServiceConfig)
    ref_model: ServiceConfig | None = None
    """The frozen reference model; null starts none, and if beta > 0 the generator's log-probabilities stand in."""


@dataclass(kw_only=True, slots=True)
class WeightsConfig:
    transport: Literal["auto", "shm", "rdma", "tcp"] = "auto"
    """How new weights travel: shared memory on one host, and between hosts RDMA if TORCHSTORE_USE_RDMA=1 and there is
    any, else TCP (auto); or the same everywhere, with TCP in the place of missing RDMA."""


def _math_reward() -> list[RewardConfig]:
    return [RewardConfig(reward="forge.data.rewards.MathReward")]


@dataclass(kw_only=True, slots=True)
class GRPOConfig(RunConfig):
    """The config of `python -m apps.grpo.main`.

    Raises:
        ConfigError: with everything that is wrong, when an instance is made.

    Example:
        >>> GRPOConfig(model="toy").training.batch_size
        4
    """

    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    training: GRPOTrainingConfig = field(default_factory=GRPOTrainingConfig)
    grpo: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    """A name such as dapo, an import path, or both keys below."""
    rewards: list[RewardConfig] = field(default_factory=_math_reward)
    """Import paths of callables (prompt, response, target) -> float, or the keys below for each; they are summed."""
    services: GRPOServices = field(default_factory=GRPOServices)
    weights: WeightsConfig = field(default_factory=WeightsConfig)

    def __post_init__(self) -> None:
        reader = Reader(type(self), built=True)
        reader.instance(self)
        problems = reader.problems or [*rules.shared_problems(self), *rules.grpo_problems(self)]
        if problems:
            raise ConfigError(problems)

    @property
    def beta(self) -> float | None:
        """The KL weight, wherever it was written: `grpo.beta`, or `beta` of the loss; None if nowhere."""
        return self.loss.args.get("beta", self.grpo.beta)

    @property
    def reference(self) -> ServiceConfig | None:
        """The reference model that is started, or None: it takes `services.ref_model`, and no beta of 0."""
        return None if self.beta == 0 else self.services.ref_model

    def colocated(self, gpus: int) -> bool:
        """Whether generator and trainer take turns, on a machine with so many GPUs."""
        trainer, generator = self.services.trainer, self.services.generator
        if generator.colocate is not None:
            return generator.colocate
        one_device = trainer.with_gpus == generator.with_gpus and (gpus == 1 or not trainer.with_gpus)
        return one_device and self.launcher == "local" and self.training.staleness_bound == 0

    @property
    def groups_per_step(self) -> int:
        """Groups (prompts) that one optimizer step consumes."""
        return self.training.batch_size * self.training.gradient_accumulation_steps

    def warnings(self) -> list[str]:
        """What is allowed but probably not meant, one line each."""
        return list(rules.grpo_warnings(self))
