"""Rules between the keys of fine-tuning; see `forge.config.rules`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from forge.config.errors import Problem
from forge.config.rules import processes_problems, services_problems

if TYPE_CHECKING:
    from forge.config.sft_schema import SFTConfig


def sft_problems(cfg: SFTConfig) -> Iterator[Problem]:
    """What is wrong in the keys of fine-tuning."""
    yield from services_problems(cfg)
    yield from processes_problems(cfg, cfg.services.trainer)
    seq_len, limit = cfg.training.seq_len, cfg.eval.max_new_tokens
    if cfg.eval.prompts and limit >= seq_len:
        yield Problem(
            key="eval.max_new_tokens",
            value=limit,
            rule=f"must be below training.seq_len = {seq_len}",
            why="prompt and answer share seq_len",
            fix=f"--eval.max_new_tokens {max(seq_len // 2, 1)}, or --training.seq_len {2 * limit}",
            involves=("training.seq_len",),
        )
    if cfg.eval.prompts and cfg.services.generator is None:
        yield Problem(
            key="services.generator",
            value=None,
            rule="must be given with eval.prompts",
            why="somebody has to answer them",
            fix="--generator.procs 1 (and --generator.with_gpus false for the CPU), or --eval.prompts '[]'",
            involves=("eval.prompts",),
        )
    if cfg.eval.patience is not None and not (cfg.eval.interval and cfg.eval.samples):
        yield Problem(
            key="eval.patience",
            value=cfg.eval.patience,
            rule="needs eval.interval, and eval.samples above 0",
            why="it counts evaluations",
            fix=f"--eval.interval {max(cfg.training.steps // 10, 1)}, or --eval.patience null",
            involves=("eval.interval", "eval.samples"),
        )


def sft_warnings(cfg: SFTConfig) -> Iterator[str]:
    """What is allowed but probably not meant."""
    if cfg.services.generator is not None and not cfg.eval.prompts:
        yield "services.generator is not started, because eval.prompts is empty."
    if cfg.eval.interval is not None and not cfg.eval.samples and not cfg.eval.prompts:
        yield "eval.interval has no effect, because eval.samples is 0 and eval.prompts is empty."
