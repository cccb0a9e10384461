"""GRPO of SmolLM2-135M with forge and with TRL 1.16, on the same machine, alternating: episodes a second.

    python -m benchmarks.grpo_vs_trl [--repetitions 3] [--steps 6] [--json FILE]
    python -m benchmarks.grpo_vs_trl --learning {toy,sums} [--repetitions 3] [--json FILE]

Both sides: the same prompts in the same order, 4 prompts × 8 samples a step, at most 32 new tokens, the same reward,
loss, learning rate and number of optimizer steps; bfloat16 with float32 weights where the CPU multiplies bfloat16, else
float32; each with its best thread setting (TRL: all cores; forge: the config's). Two kinds of prompt: the question
alone, and 512 tokens with worked examples in front. The reward (the share of digits) differs between any two answers,
so that no group is skipped by either. Time counts from the moment that everything has started to the end of the last
step; start-up is reported apart.

`--learning` compares what is learned instead: held-out reward, judged by the same engine, after the same number of
steps of each side: 40 of `apps/grpo/toy.yaml` on one tiny random model, a few minutes, or 20 of the task of `make grpo`
with one worked example, most of an hour.

TRL generates with transformers here. Its vLLM mode wants a GPU: the server, and the colocated engine, move weights by
NCCL or CUDA memory.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from transformers import AutoTokenizer

from benchmarks.report import SMOLLM2, median_of, parser, report
from forge.config import GRPOConfig, parse_args
from forge.data.datasets import build_datasets
from forge.testing.tiny_model import make_tiny_model

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "apps/grpo/smollm2_135m.yaml"
CORES = len(os.sched_getaffinity(0))
EPISODES = 4 * 8
SIDES = ("TRL", "forge")


def share_of_digits(prompt: str, response: str, target: str) -> float:
    """A reward that any two answers rarely have in common."""
    return sum(c.isdigit() for c in response) / max(len(response), 1) + 0.001 * len(response)


def recipe(*, examples: int, rewards: list[Any] | None, seq_len: int) -> dict[str, Any]:
    """The config of `make grpo` with so many worked examples, 4 × 8 episodes and 32 new tokens; no evaluation."""
    config: dict[str, Any] = yaml.safe_load(RECIPE.read_text())
    config["model"] = str(SMOLLM2)
    config["dataset"]["examples"] = [
        {
            "prompt": f"State the final answer to the following arithmetic problem: {7 * i + 3} + {5 * i + 2} =",
            "response": f"<answer>{12 * i + 5}</answer>",
        }
        for i in range(1, examples + 1)
    ]
    config["training"] |= {"batch_size": 4, "seq_len": seq_len, "lr_schedule": "constant", "warmup_steps": 0}
    if rewards:  # it is speed that is measured: a policy that learned to be brief would do less work
        config["training"]["learning_rate"] = 1e-6
    config["grpo"] |= {"n_samples": 8, "max_new_tokens": 32}
    config["rewards"] = rewards or config["rewards"]
    config["eval"] = {"samples": 0}
    config["checkpoint"] = {"interval": None, "keep_latest_k": 1}
    return config


SETTINGS: dict[str, dict[str, Any]] = {
    "question alone": {
        "config": recipe(examples=0, rewards=["benchmarks.grpo_vs_trl.share_of_digits"], seq_len=128),
    },
    "512-token prompt": {
        "config": recipe(examples=13, rewards=["benchmarks.grpo_vs_trl.share_of_digits"], seq_len=640),
        "steps": 1,  # of TRL it takes minutes
    },
}


def run(side: str, config: dict[str, Any], folder: Path, *, steps: int) -> dict[str, Any]:
    """One run in processes of its own; seconds of start-up, seconds of all steps, and the last step's values."""
    folder.mkdir(parents=True)
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(config))
    program = {"TRL": "benchmarks.trl_run", "forge": "apps.grpo.main"}[side]
    command = [sys.executable, "-m", program, "--config", str(path), "--output_dir", str(folder / "run")]
    started = time.perf_counter()
    done = subprocess.run(
        [*command, "--training.steps", str(steps)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": str(CORES)},  # forge gives each of its processes a number of its own
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{side} ended with {done.returncode}:\n{done.stdout[-3000:]}")
    whole = time.perf_counter() - started
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "reward/mean" in line]
    assert len(lines) == steps
    seconds = lines[-1]["seconds"] if side == "TRL" else sum(line["time/step"] for line in lines)
    length = sum(line["completion/mean_len"] for line in lines) / steps
    return {
        "side": side,
        "start_s": whole - seconds,
        "steps_s": seconds,
        "length": length,
        "rewards": rewards_of(lines),
    }


def rewards_of(lines: list[dict[str, Any]]) -> list[float]:
    return [line["reward/mean"] for line in lines]


def speed(repetitions: int, steps: int, scratch: Path) -> list[dict[str, Any]]:
    """Episodes a second of both sides in both settings; medians, and their ratio. `steps` for the shorter prompts."""
    rows = []
    for name, setting in SETTINGS.items():
        setting = {"steps": steps, **setting}
        runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
        for repetition in range(repetitions):
            for side in SIDES:
                folder = scratch / f"{name}-{side}-{repetition}".replace(" ", "_")
                runs[side].append(run(side, setting["config"], folder, steps=setting["steps"]))
                print(f"{name}, {side}: {runs[side][-1]['steps_s']:.1f} s", flush=True)
        rates = {s: [setting["steps"] * EPISODES / r["steps_s"] for r in runs[s]] for s in SIDES}
        for side in SIDES:
            rows.append(
                {
                    "prompts": name,
                    "side": side,
                    "prompt_tokens": prompt_tokens(setting["config"]),
                    "length": median_of([r["length"] for r in runs[side]]),
                    "steps": setting["steps"],
                    "episodes_per_s": median_of(rates[side]),
                    "all": rates[side],
                    "ratio": median_of(rates[side]) / median_of(rates["TRL"]),
                    "start_s": median_of([r["start_s"] for r in runs[side]]),
                }
            )
    return rows


def prompt_tokens(config: dict[str, Any]) -> int:
    """Length of the first prompt."""
    samples, _ = datasets(config)
    return len(next(samples).prompt_ids)


def datasets(config: dict[str, Any]) -> tuple[Any, Any]:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(config, file)
        file.flush()
        read = parse_args(GRPOConfig, ["--config", file.name], prog="grpo_vs_trl").config
    tokenizer = AutoTokenizer.from_pretrained(read.model)
    longest = read.training.seq_len - (read.grpo.max_new_tokens or 1)
    return build_datasets(read.dataset, read.eval, tokenizer, seed=read.training.seed, max_prompt_tokens=longest)


def learning(task: str, repetitions: int, scratch: Path) -> list[dict[str, Any]]:
    """Held-out accuracy and reward before training and after it on each side, for `repetitions` seeds."""
    if task == "toy":
        model, steps = make_tiny_model(scratch / "tiny"), 40
        config: dict[str, Any] = yaml.safe_load((ROOT / "apps/grpo/toy.yaml").read_text())
        config |= {"checkpoint": {"interval": None}, "eval": {"samples": 64}, "model": str(model)}
    else:
        model, steps = SMOLLM2, 20
        config = recipe(examples=1, rewards=None, seq_len=160) | {"eval": {"samples": 128}}
    rows: list[dict[str, Any]] = [{"side": "before", "steps": 0, **held_out(config, model)}]
    for seed in range(1, repetitions + 1):
        config["training"]["seed"] = seed
        for side in SIDES:
            folder = scratch / f"learning-{side}-{seed}"
            done = run(side, config, folder, steps=steps)
            trained = folder / "run/hf" if side == "TRL" else folder / f"run/checkpoints/step-{steps}/hf"
            rows.append({**done, "seed": seed, "steps": steps, **held_out(config, trained)})
            print(f"{side}, seed {seed}: {rows[-1]['reward']:.3f} in {done['steps_s']:.0f} s", flush=True)
    return rows


def held_out(config: dict[str, Any], model: Path) -> dict[str, float]:
    """`eval/accuracy` and `eval/reward` of a model folder, in a process of its own."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(config, file)
        file.flush()
        command = [sys.executable, "-m", "benchmarks.grpo_vs_trl", "--judge", file.name, str(model)]
        done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    judged: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return judged


async def judge(config: dict[str, Any], model: str) -> dict[str, float]:
    """Greedy answers to the held-out problems, by vLLM in this process."""
    from forge.actors.generator import Generator
    from forge.actors.reward import RewardActor
    from forge.evaluation import evaluate
    from forge.rollout import RolloutSettings

    _, problems = datasets(config)
    limit, seq_len = config["grpo"]["max_new_tokens"], config["training"]["seq_len"]
    generator = Generator(model=model, dtype="float32", max_model_len=seq_len, max_num_seqs=128)
    await generator.setup()
    try:
        rewards = RewardActor(rewards=config["rewards"])

        async def score(answers: list[tuple[str, str, str]]) -> list[Any]:
            return rewards.score(answers)

        settings = RolloutSettings(n_samples=1, seq_len=seq_len, max_new_tokens=limit)
        values, _ = await evaluate(problems, settings=settings, generate=generator.generate, score=score)
    finally:
        await generator.shutdown()
    return {"accuracy": values["eval/accuracy"], "reward": values["eval/reward"]}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--repetitions", type=int, default=3)
    options.add_argument("--steps", type=int, default=6, help="with the question alone; the first fills the pipeline")
    options.add_argument("--learning", choices=("toy", "sums"), help="compare what is learned")
    options.add_argument("--judge", nargs=2, metavar=("CONFIG", "MODEL"), help="(what --learning starts)")
    chosen = options.parse_args()
    if chosen.judge:
        print(json.dumps(asyncio.run(judge(json.loads(Path(chosen.judge[0]).read_text()), chosen.judge[1]))))
        return
    with tempfile.TemporaryDirectory(prefix="forge-bench-") as scratch:
        if chosen.learning:
            report(
                "grpo_vs_trl: learning",
                learning(chosen.learning, chosen.repetitions, Path(scratch)),
                columns={
                    "side": "side",
                    "seed": "seed",
                    "steps": "steps",
                    "accuracy": "held-out accuracy:.3f",
                    "reward": "held-out reward:.3f",
                    "steps_s": "seconds:.0f",
                },
                json_path=chosen.json,
            )
            return
        report(
            "grpo_vs_trl",
            speed(chosen.repetitions, chosen.steps, Path(scratch)),
            columns={
                "prompts": "prompts",
                "side": "side",
                "prompt_tokens": "prompt tokens",
                "length": "response tokens:.1f",
                "steps": "steps",
                "episodes_per_s": "episodes/s:.2f",
                "ratio": "against TRL:.1f",
                "start_s": "start-up s:.0f",
            },
            json_path=chosen.json,
            repetitions=chosen.repetitions,
        )


if __name__ == "__main__":
    main()
