"""What `--dry_run` and `forge estimate` say about a GRPO config: checked, placed, and its memory and work estimated."""

from __future__ import annotations

from pathlib import Path

from apps.grpo.parts import check_settings, read_data, services_of, turns_of
from forge.config import GRPOConfig
from forge.estimate import (
    ASSUMED_GPU_GIB,
    compute_lines,
    generator_memory,
    gpu_gib,
    host_gib,
    memory_lines,
    model_line,
    reference_memory,
    trainer_memory,
)
from forge.models.architectures import Architecture, check_architecture
from forge.models.hf_folder import ModelNotFound, read_config
from forge.parts import check_model, describe_placement, generator_arguments, published_architecture, read_model
from forge.precision import resolve_dtype


def describe(config: GRPOConfig, scratch: Path) -> list[str]:
    """Checks everything that a run reads, and says what it would start and take.

    A well-known hub model that is not in reach is judged by its published shape; its tokenizer, and so the data, are
    then not checked.

    Args:
        scratch: where the tiny model of `model: toy` is made.

    Raises:
        UserError: with what to mend.
    """
    check_settings(config)
    placement = describe_placement(config, services_of(config), turns_of(config))
    published = None
    try:
        folder, tokenizer = read_model(config, scratch, generator=config.services.generator)
        model = check_architecture(read_config(folder))
        heldout = f"{len(read_data(config, tokenizer)[1])} problems held out"
    except ModelNotFound:
        if (published := published_architecture(config.model)) is None:
            raise
        model, heldout = published, "not read: the model's tokenizer is not in reach"
        check_model(config, model, generator=config.services.generator)
    return [
        model_line(config, model, published=published is not None),
        f"data       {config.dataset.path}: {heldout}",
        f"step       {config.groups_per_step} prompts × {config.grpo.n_samples} samples, {config.training.steps} steps",
        *placement,
        *describe_memory(config, model),
    ]


def describe_memory(config: GRPOConfig, model: Architecture) -> list[str]:
    """Memory of each device and work of each step."""
    services, training = config.services, config.training
    gpu = gpu_gib() or ASSUMED_GPU_GIB
    rows = [
        trainer_memory(model, training, config.parallelism, services.trainer),
        generator_memory(
            model,
            dtype=generator_arguments(config, services.generator, services.trainer)["dtype"],
            seq_len=training.seq_len,
            service=services.generator,
            device_gib=gpu,
        ),
    ]
    if config.reference is not None:
        trainer_dtype = resolve_dtype(training.dtype, with_gpus=services.trainer.with_gpus)
        rows.append(reference_memory(model, training, config.reference, dtype=trainer_dtype))
    new_tokens = config.grpo.max_new_tokens or training.seq_len // 2
    return [
        *memory_lines(rows, gpu=gpu, host=host_gib()),
        *compute_lines(
            model,
            training,
            sequences=config.groups_per_step * config.grpo.n_samples,
            tokens=new_tokens,
            prompts=config.groups_per_step,
            prompt_tokens=training.seq_len - new_tokens,
            forwards=["generate"] + ["reference"] * (config.reference is not None),
        ),
    ]
