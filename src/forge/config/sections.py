"""The sections that every training app shares. The text under a field is what `--help` prints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from forge.config.fields import Count, NonNegativeFloat, PositiveFloat, PositiveInt, Range

LoRATarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(kw_only=True, slots=True)
class ColumnsConfig:
    prompt: str | None = None
    """The column that holds the question; null finds prompt, question or problem."""
    target: str | None = None
    """The column that holds the right answer; null finds target, answer or solution."""


@dataclass(kw_only=True, slots=True)
class ExampleConfig:
    prompt: str
    """What the user asks in this worked example."""
    response: str
    """What the model should have answered."""


@dataclass(kw_only=True, slots=True)
class SourceConfig:
    """Which rows: what the data sets of every app have in common."""

    path: str = field(metadata={"path": True})
    """A hub id, a local file (json, jsonl, parquet) or folder, `reasoning_gym`, or `toy`."""
    name: str | None = None
    """The subset of a hub data set (null: the only one, or `main`), or the reasoning-gym task, such as chain_sum."""
    split: str = "train"
    """The split to train on."""
    streaming: bool = False
    """Read rows as they are needed instead of downloading everything first."""
    system_prompt: str | None = None
    """The system message before every prompt."""
    parameters: dict[str, Any] = field(default_factory=dict)
    """Parameters of a reasoning-gym task, such as {min_terms: 2, max_terms: 2}."""
    size: PositiveInt | None = None
    """How many rows to use or problems to make; null is all of them; 10,000 of a generated task."""


@dataclass(kw_only=True, slots=True)
class DatasetConfig(SourceConfig):
    path: str = field(default="openai/gsm8k", metadata={"path": True})
    """A hub id, a local file (json, jsonl, parquet) or folder, `reasoning_gym`, or `toy`."""
    columns: ColumnsConfig = field(default_factory=ColumnsConfig)
    examples: list[ExampleConfig] = field(default_factory=list)
    """Worked examples, shown as earlier turns of the conversation."""
    shuffle: bool = True
    """Shuffle anew in every epoch, with training.seed."""
    prompt_template: str | None = None
    """Text around the question, in which {prompt} stands for it; null is the question alone."""
    chat_template: str | None = None
    """A Jinja chat template; null is the tokenizer's own."""


@dataclass(kw_only=True, slots=True)
class TrainingConfig:
    steps: PositiveInt = 100
    """Optimizer steps of the whole run."""
    batch_size: PositiveInt = 4
    """Prompts, or samples of fine-tuning, in one accumulation step, over all ranks; an optimizer step takes
    batch_size × gradient_accumulation_steps."""
    gradient_accumulation_steps: PositiveInt = 1
    """Accumulation steps in one optimizer step."""
    learning_rate: PositiveFloat = 1e-6
    """Peak learning rate of AdamW."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What follows the warm-up: stay, or fall to 0 at the last step."""
    warmup_steps: Count = 0
    """Steps in which the learning rate grows linearly from 0."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay of AdamW."""
    max_norm: PositiveFloat | None = 1.0
    """Gradients are scaled down to this norm; null leaves them as they are."""
    seq_len: PositiveInt = 2048
    """The most tokens of prompt and response together."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """What to compute in; master weights are float32. auto: bfloat16 if the hardware is fast in it, else float32."""
    max_tokens_per_microbatch: PositiveInt | None = None
    """Tokens of the packed row of one forward; more is faster and takes more memory. null is what memory holds."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """Recompute activations in the backward: less memory, more time."""
    packing: bool = True
    """Compute many sequences in one row, and what several begin with once; false gives each a row of its own, which is
    slower and computes the same. Padding is computed in neither."""
    compile: bool = False
    """Compile the model with torch.compile."""
    seed: Count = 42
    """Seed of data order, sampling and new weights."""


@dataclass(kw_only=True, slots=True)
class LoRAConfig:
    """Train small matrices beside frozen ones (arXiv 2106.09685)."""

    rank: PositiveInt = 16
    """Width of the small matrices."""
    alpha: PositiveFloat = 32.0
    """What they compute is multiplied by alpha / rank."""
    dropout: Annotated[float, Range(least=0, below=1)] = 0.0
    """The part of their inputs that is dropped while training."""
    target_modules: list[LoRATarget] | None = None
    """The matrices that get one; null is every matrix of a block."""
    merge: bool = True
    """Write the merged model to checkpoints/step-N/hf as well; false writes checkpoints/step-N/adapter alone."""


@dataclass(kw_only=True, slots=True)
class ParallelismConfig:
    data_parallel_replicate_degree: PositiveInt = 1
    """Copies of the model that see different data."""
    data_parallel_shard_degree: Annotated[int, Range(least=-1)] = -1
    """Processes that one copy's weights and data are spread over (FSDP); -1 is all that the other degrees leave."""
    tensor_parallel_degree: PositiveInt = 1
    """Processes that every matrix is split over."""
    pipeline_parallel_degree: PositiveInt = 1
    """Processes that the layers are split over; the packed rows of a step pass through them one behind the other."""
    context_parallel_degree: PositiveInt = 1
    """Must be 1: a packed row, in which prompts stand once, is attended to on one process."""
    expert_parallel_degree: PositiveInt = 1
    """Must be 1: none of the supported architectures has experts."""


@dataclass(kw_only=True, slots=True)
class ServiceConfig:
    procs: PositiveInt = 1
    """Processes of one replica on each of its hosts; one GPU each if with_gpus."""
    num_replicas: PositiveInt = 1
    """Independent copies of the service."""
    with_gpus: bool = True
    """false puts the service on the CPU."""
    hosts: PositiveInt = 1
    """Machines that one replica spans."""
    threads: PositiveInt | None = None
    """CPU threads of one process; null shares the cores out, but a trainer or generator on the CPU gets them all."""


@dataclass(kw_only=True, slots=True)
class EvalConfig:
    interval: PositiveInt | None = None
    """Optimizer steps between evaluations; null evaluates before and after training only."""
    samples: Count = 64
    """Held-out problems, never trained on; 0 evaluates nothing."""
    split: str | None = None
    """The split they come from; null is test or validation if there is one, else they are set aside from training."""
    max_new_tokens: PositiveInt | None = None
    """The most tokens of an answer; null is as in training."""


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    interval: PositiveInt | None = 50
    """Optimizer steps between checkpoints; null saves one at the end only."""
    keep_latest_k: PositiveInt = 2
    """How many are kept; older ones are removed once a new one is whole."""
    resume: Literal["auto", "never"] = "auto"
    """auto continues what the output folder holds; never refuses a folder that holds a run."""


@dataclass(kw_only=True, slots=True)
class RestartsConfig:
    max: Count = 5
    """How often one service may be restarted within window_s after a process died; then the run ends. 0 is never."""
    window_s: PositiveFloat = 600.0
    """Restarts longer ago, in seconds, do not count any more."""
    backoff_s: NonNegativeFloat = 1.0
    """Seconds before the second restart within window_s; twice as many before each further one, 60 at most."""


@dataclass(kw_only=True, slots=True)
class GuardConfig:
    SHORTHAND: ClassVar[str] = "action"
    action: Literal["ignore", "warn", "stop"] = "warn"
    """What to do when the bound is passed on guards.patience steps in a row."""
    bound: NonNegativeFloat | None = None
    """The bound; null is the guard's own, which stands with its meaning at its name."""


@dataclass(kw_only=True, slots=True)
class GuardsConfig:
    patience: PositiveInt = 3
    """Steps in a row that make a trend."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """NaN or infinity in a step, which is never applied: end the run, or try other groups, patience times in a row."""
    entropy: GuardConfig = field(default_factory=GuardConfig)
    """Collapse: entropy below this share (0.1) of what the run began with while the mean reward is below 0.9."""
    kl: GuardConfig = field(default_factory=GuardConfig)
    """Runaway: KL to the reference above this (0.5 nats a token); runs that learn well stay below 0.1."""
    mismatch: GuardConfig = field(default_factory=GuardConfig)
    """Trainer and generator differ by more than this (0.1 nats) on on-policy tokens; bfloat16 alone gives 0.04."""
    constant_reward: GuardConfig = field(default_factory=GuardConfig)
    """More than this share (0.9) of the groups had one reward in all episodes."""
    truncated: GuardConfig = field(default_factory=GuardConfig)
    """More than this share (0.99) of the completions was cut off at grpo.max_new_tokens."""


@dataclass(kw_only=True, slots=True)
class MetricsConfig:
    wandb: bool | Literal["online", "offline"] = False
    """Weights & Biases; true is online, unless WANDB_MODE says otherwise."""
    wandb_project: str = "forge"
    """The project that Weights & Biases files the run under."""
    tensorboard: bool = True
    """Write TensorBoard event files into the output folder."""
    console: bool = True
    """Show progress in the terminal."""


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """What every app's config has; an app adds `services` and sections of its own."""

    model: str = field(metadata={"path": True})
    """A hub id, an hf:// id or a local folder; `toy` makes a tiny model on the spot."""
    dataset: SourceConfig
    training: TrainingConfig = field(default_factory=TrainingConfig)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    lora: LoRAConfig | None = None
    """Train LoRA adapters and leave the model's own weights as they are; null trains the weights."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    restarts: RestartsConfig = field(default_factory=RestartsConfig)
    guards: GuardsConfig = field(default_factory=GuardsConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    launcher: Literal["local", "hosts", "slurm"] = "local"
    """Where processes start: on this machine, on the machines in `hosts`, or on those of the SLURM job."""
    hosts: list[str] = field(default_factory=list)
    """The machines of launcher: hosts."""
    output_dir: str | None = field(default=None, metadata={"path": True})
    """The run folder; null is runs/<app>-<time>. The same folder again resumes the run in it."""
