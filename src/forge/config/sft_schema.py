"""The config of supervised fine-tuning. The text under a field is what `--help` prints."""

from __future__ import annotations

from dataclasses import dataclass, field

from forge.config import rules, sft_rules
from forge.config.errors import ConfigError
from forge.config.fields import PositiveInt, Reader
from forge.config.schema import GeneratorServiceConfig
from forge.config.sections import CheckpointConfig, RunConfig, ServiceConfig
from forge.config.sft_data import SFTDatasetConfig, SFTEvalConfig


@dataclass(kw_only=True, slots=True)
class SFTValidationConfig(SFTEvalConfig):
    prompts: list[str] = field(default_factory=list)
    """What the model is asked at each evaluation, to see how it answers; needs services.generator."""
    max_new_tokens: PositiveInt = 64
    """The most tokens of an answer to one of the prompts."""
    patience: PositiveInt | None = None
    """Evaluations in a row without a lower loss after which the run ends; null trains all steps."""


@dataclass(kw_only=True, slots=True)
class SFTCheckpointConfig(CheckpointConfig):
    keep_best: bool = True
    """Save the weights of each new lowest validation loss, and keep them beside the latest, as checkpoints/best."""


@dataclass(kw_only=True, slots=True)
class SFTServices:
    trainer: ServiceConfig = field(default_factory=ServiceConfig)
    generator: GeneratorServiceConfig | None = None
    """Answers eval.prompts; null, or no prompts, starts none."""


@dataclass(kw_only=True, slots=True)
class SFTConfig(RunConfig):
    """The config of `python -m apps.sft.main`.

    Raises:
        ConfigError: with everything that is wrong, when an instance is made.

    Example:
        >>> SFTConfig(model="toy", dataset=SFTDatasetConfig(path="toy")).training.batch_size
        4
    """

    dataset: SFTDatasetConfig
    eval: SFTValidationConfig = field(default_factory=SFTValidationConfig)
    checkpoint: SFTCheckpointConfig = field(default_factory=SFTCheckpointConfig)
    services: SFTServices = field(default_factory=SFTServices)

    def __post_init__(self) -> None:
        reader = Reader(type(self), built=True)
        reader.instance(self)
        problems = reader.problems or [*rules.shared_problems(self), *sft_rules.sft_problems(self)]
        if problems:
            raise ConfigError(problems)

    @property
    def generator(self) -> GeneratorServiceConfig | None:
        """The generator that is started, or None: it takes `services.generator` and prompts."""
        return self.services.generator if self.eval.prompts else None

    @property
    def documents_per_step(self) -> int:
        """Documents that one optimizer step consumes."""
        return self.training.batch_size * self.training.gradient_accumulation_steps

    def warnings(self) -> list[str]:
        """What is allowed but probably not meant, one line each."""
        return list(sft_rules.sft_warnings(self))
