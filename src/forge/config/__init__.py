"""Config: a YAML file and a command line → dataclasses. Every mistake of the user's is told here, before a start.

Importing this imports no torch. Read `sections.py` and `schema.py` for the keys and their meaning, `rules.py` for what
must fit together, and `load.py` for how a file and overrides become a config.

Example:
    >>> from forge.config import GRPOConfig, load_config
    >>> cfg = load_config(GRPOConfig, "apps/grpo/toy.yaml", ["--training.steps", "5"])
"""

from forge.config.errors import EXIT_WRONG_INPUT, ConfigError, Problem, exit_on_user_error
from forge.config.load import Invocation, load_config, make_output_dir, parse_args, to_yaml
from forge.config.schema import (
    AlgorithmConfig,
    CorrectionConfig,
    GeneratorServiceConfig,
    GRPOConfig,
    GRPOServices,
    GRPOTrainingConfig,
    LossConfig,
    RewardConfig,
    RewardServiceConfig,
)
from forge.config.sections import (
    CheckpointConfig,
    ColumnsConfig,
    DatasetConfig,
    EvalConfig,
    ExampleConfig,
    GuardConfig,
    GuardsConfig,
    LoRAConfig,
    MetricsConfig,
    ParallelismConfig,
    RestartsConfig,
    RunConfig,
    ServiceConfig,
    SourceConfig,
    TrainingConfig,
)
from forge.config.sft_data import SFTColumnsConfig, SFTDatasetConfig, SFTEvalConfig, SFTSourceConfig
from forge.config.sft_schema import SFTCheckpointConfig, SFTConfig, SFTServices, SFTValidationConfig

__all__ = [
    "EXIT_WRONG_INPUT",
    "AlgorithmConfig",
    "CheckpointConfig",
    "ColumnsConfig",
    "ConfigError",
    "CorrectionConfig",
    "DatasetConfig",
    "EvalConfig",
    "ExampleConfig",
    "GRPOConfig",
    "GRPOServices",
    "GRPOTrainingConfig",
    "GeneratorServiceConfig",
    "GuardConfig",
    "GuardsConfig",
    "Invocation",
    "LoRAConfig",
    "LossConfig",
    "MetricsConfig",
    "ParallelismConfig",
    "Problem",
    "RestartsConfig",
    "RewardConfig",
    "RewardServiceConfig",
    "RunConfig",
    "SFTCheckpointConfig",
    "SFTColumnsConfig",
    "SFTConfig",
    "SFTDatasetConfig",
    "SFTEvalConfig",
    "SFTServices",
    "SFTSourceConfig",
    "SFTValidationConfig",
    "ServiceConfig",
    "SourceConfig",
    "TrainingConfig",
    "exit_on_user_error",
    "load_config",
    "make_output_dir",
    "parse_args",
    "to_yaml",
]
