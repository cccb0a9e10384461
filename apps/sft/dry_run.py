"""What `--dry_run` and `forge estimate` say about a fine-tuning config: checked, placed, and its memory estimated."""

from __future__ import annotations

from pathlib import Path

from apps.sft.parts import read_files, services_of
from forge.config import SFTConfig
from forge.estimate import (
    ASSUMED_GPU_GIB,
    compute_lines,
    generator_memory,
    gpu_gib,
    host_gib,
    memory_lines,
    model_line,
    trainer_memory,
)
from forge.models.architectures import check_architecture
from forge.models.hf_folder import ModelNotFound, read_config
from forge.parts import check_model, describe_placement, generator_arguments, published_architecture


def describe(config: SFTConfig, scratch: Path) -> list[str]:
    """Checks everything that a run reads, and says what it would start and take; see `apps.grpo.dry_run.describe`.

    Args:
        scratch: where the tiny model of `model: toy` is made.

    Raises:
        UserError: with what to mend.
    """
    placement = describe_placement(config, services_of(config))
    published = None
    try:
        inputs = read_files(config, scratch)
        model = check_architecture(read_config(inputs.model))
        heldout = f"{len(inputs.heldout)} samples held out"
    except ModelNotFound:
        if (published := published_architecture(config.model)) is None:
            raise
        model, heldout = published, "not read: the model's tokenizer is not in reach"
        check_model(config, model, generator=config.generator)
    training, trainer, generator = config.training, config.services.trainer, config.generator
    gpu = gpu_gib() or ASSUMED_GPU_GIB
    rows = [trainer_memory(model, training, config.parallelism, trainer, trained=config.lora is None)]
    if generator is not None:
        dtype = generator_arguments(config, generator, trainer)["dtype"]
        rows.append(generator_memory(model, dtype=dtype, seq_len=training.seq_len, service=generator, device_gib=gpu))
    return [
        model_line(config, model, published=published is not None),
        f"data       {', '.join(source.path for source in config.dataset.sources)}: {heldout}",
        f"step       {config.documents_per_step} samples of at most {training.seq_len} tokens, {training.steps} steps",
        *placement,
        *memory_lines(rows, gpu=gpu, host=host_gib()),
        *compute_lines(model, training, sequences=config.documents_per_step, tokens=training.seq_len),
    ]
