"""What `apps.grpo.main` does, done with TRL's GRPOTrainer: the other side of `grpo_vs_trl.py`.

    python -m benchmarks.trl_run --config apps/grpo/smollm2_135m.yaml --output_dir DIR [--key.path value ...]

Reads the same config; takes the same prompts in the same order, the same rewards, sampling limits, loss, clipping and
learning rate. Writes `metrics.jsonl` (a line a step) and `hf/` (the trained model) into DIR.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig as TRLConfig
from trl import GRPOTrainer

from forge.actors.trainer import learning_rate_factor
from forge.config import GRPOConfig, parse_args
from forge.data.datasets import build_datasets
from forge.data.rewards import build_rewards, score
from forge.precision import resolve_dtype

ROWS_TOKENS = 2200
"""Tokens of one micro-batch, prompts and padding included: more does not make it faster on two cores, and takes 1.5 MB
of activations each."""


class StepLog(TrainerCallback):
    """Writes when each step ended, in seconds since training began, and its mean reward."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")
        self._began = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._began = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if "reward" in logs:
            line = {
                "step": state.global_step,
                "seconds": time.perf_counter() - self._began,
                "reward/mean": logs["reward"],
                "completion/mean_len": logs["completions/mean_length"],
            }
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()


def trl_config(config: GRPOConfig, folder: Path, *, micro_batch: int) -> TRLConfig:
    """The same run in TRL's words, without gradient checkpointing or logging elsewhere: its fastest on a CPU."""
    training, grpo = config.training, config.grpo
    episodes = config.groups_per_step * grpo.n_samples
    return TRLConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=resolve_dtype(training.dtype, with_gpus=False) == "bfloat16",
        gradient_checkpointing=False,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=episodes // micro_batch,
        num_generations=grpo.n_samples,
        max_completion_length=grpo.max_new_tokens,
        max_steps=training.steps,
        learning_rate=training.learning_rate,
        lr_scheduler_type="constant",  # the factor of every step is set by hand, see main
        weight_decay=training.weight_decay,
        max_grad_norm=training.max_norm or 0.0,
        temperature=grpo.temperature,
        top_p=grpo.top_p,
        loss_type="grpo",
        beta=0.0,
        epsilon=0.2 if grpo.clip_low is None else grpo.clip_low,
        epsilon_high=0.2 if grpo.clip_high is None else grpo.clip_high,
        shuffle_dataset=False,
        seed=training.seed,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def main() -> None:
    config = parse_args(GRPOConfig, sys.argv[1:], prog="python -m benchmarks.trl_run").config
    assert config.loss.name == "grpo"
    assert config.output_dir is not None
    folder = Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0)))))
    tokenizer = AutoTokenizer.from_pretrained(config.model)
    longest = config.training.seq_len - (config.grpo.max_new_tokens or 1)
    samples, _ = build_datasets(
        config.dataset, config.eval, tokenizer, seed=config.training.seed, max_prompt_tokens=longest
    )
    taken = [next(samples) for _ in range(config.groups_per_step * config.training.steps)]
    assert all(tokenizer(s.prompt)["input_ids"] == s.prompt_ids for s in taken)
    rewards = build_rewards(config.rewards)

    def judge(prompts: list[str], completions: list[str], target: list[str], **_: Any) -> list[float]:
        return [score(rewards, *three)[0] for three in zip(prompts, completions, target, strict=True)]

    episodes = config.groups_per_step * config.grpo.n_samples
    row = max(len(s.prompt_ids) for s in taken) + (config.grpo.max_new_tokens or 1)
    fitting = [n for n in range(1, episodes + 1) if episodes % n == 0 and n * row <= ROWS_TOKENS]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float32),
        reward_funcs=judge,
        args=trl_config(config, folder, micro_batch=max(fitting, default=1)),
        train_dataset=Dataset.from_list([{"prompt": s.prompt, "target": s.target} for s in taken]),
        processing_class=tokenizer,
        callbacks=[StepLog(folder / "metrics.jsonl")],
    )
    optimizer = trainer.create_optimizer()
    trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, config.training)
    )
    trainer.train()
    trainer.save_model(str(folder / "hf"))


if __name__ == "__main__":
    main()
