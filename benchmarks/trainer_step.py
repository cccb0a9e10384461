"""One optimizer step of SmolLM2-135M on group batches: shared prompts once, packed, and padded.

    OMP_NUM_THREADS=2 python -m benchmarks.trainer_step [--json FILE]

Forward, backward, clipping and AdamW, in float32, and in bfloat16 where the CPU multiplies it. "padded" computes every
place of the [B, P + R] rectangle, as other trainers do; "packed" no padding; "shared" each common prefix once, which is
what the trainer does. FLOPs are the useful ones of unique tokens, the same for the three, so the last column says how
much of the machine's matrix-product speed, measured just before in the same threads, arrives in learning. Medians of
three, the ways alternating.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.report import SMOLLM2, median_of, parser, report
from forge.actors.scoring import Scorer
from forge.batching import make_batch
from forge.config import ParallelismConfig
from forge.losses import build_loss
from forge.models.build import LoadedModel, load_model
from forge.models.flops import training_flops
from forge.objective import Objective, OneRank
from forge.packing import PackedRow, pack, pack_documents
from forge.precision import cpu_multiplies_bfloat16
from forge.types import Episode, Group

MAX_TOKENS = 4096
Batch = tuple[dict[str, Tensor], dict[str, Tensor]]


def matmul_gflops(dtype: str, size: int = 1024) -> float:
    """What a large matrix product reaches on this process's threads: the best of several, by the clock on the wall."""
    a = torch.randn(size, size).to(getattr(torch, dtype))
    best = float("inf")
    for _ in range(8):
        started = time.perf_counter()
        torch.mm(a, a)
        best = min(best, time.perf_counter() - started)
    return 2.0 * size**3 / best / 1e9


def group_batch(
    *, preamble: int, prompts: int, prompt: int, samples: int, shortest: int, longest: int, vocabulary: int = 40_000
) -> Batch:
    """`prompts` groups: all prompts begin with the same `preamble` tokens; responses of evenly spread lengths."""
    rng = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(vocabulary) for _ in range(count)]

    start, groups = tokens(preamble), []
    for index in range(prompts):
        prompt_ids, episodes = start + tokens(prompt), []
        for sample in range(samples):
            length = shortest + (longest - shortest) * sample // max(samples - 1, 1)
            episodes.append(
                Episode(
                    prompt="",
                    response="",
                    target="",
                    prompt_ids=prompt_ids,
                    response_ids=tokens(length),
                    generator_logprobs=[-2.0] * length,
                    response_mask=[True] * length,
                    advantage=rng.gauss(0, 1),
                )
            )
        groups.append(Group(id=index, sample_id="", episodes=episodes))
    inputs, targets = make_batch(groups, ranks=1, pad_id=0)
    return inputs[0], targets[0]


def shared(inputs: dict[str, Tensor], targets: dict[str, Tensor]) -> list[PackedRow]:
    return pack(inputs, targets, max_tokens=MAX_TOKENS, keep_last=False)


def packed(inputs: dict[str, Tensor], targets: dict[str, Tensor]) -> list[PackedRow]:
    return pack(inputs, targets, max_tokens=MAX_TOKENS, share_prefixes=False)


def padded(inputs: dict[str, Tensor], targets: dict[str, Tensor]) -> list[PackedRow]:
    """Every row of the rectangle whole, scored in every response column: the shapes of a padded forward."""
    width, columns = inputs["tokens"].shape[1], targets["response"].shape[1]
    every = [list(range(width - columns, width))] * len(inputs["tokens"])
    rows = pack_documents(inputs["tokens"].tolist(), every, max_tokens=MAX_TOKENS, share_prefixes=False)
    for row in rows:
        row.score_col_N.sub_(width - columns)
    return rows


def steps_of(model: LoadedModel, batch: Batch, *, loss: nn.Module | None = None) -> Callable[[list[PackedRow]], float]:
    """A function that makes one optimizer step over the rows and returns its seconds; the loss is GRPO's by default."""
    scorer = Scorer(model, temperature=1.0, device=torch.device("cpu"))
    objective = Objective(loss or build_loss("grpo"))
    optimizer = torch.optim.AdamW(model.module.parameters(), lr=1e-6, fused=True)
    targets = {k: v for k, v in batch[1].items() if k != "response"}

    def step(rows: list[PackedRow]) -> float:
        started = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        objective.backward(targets, rows, model=scorer, ranks=OneRank())
        torch.nn.utils.clip_grad_norm_(model.module.parameters(), 1.0)
        optimizer.step()
        return time.perf_counter() - started

    return step


def measure(dtype: str) -> list[dict[str, Any]]:
    """The rows of one number format."""
    model = load_model(
        str(SMOLLM2), parallelism=ParallelismConfig(), dtype=dtype, device="cpu", seq_len=1024, trainable=True
    )
    batches = {
        "8 × (128 + 8 to 32)": (
            group_batch(preamble=0, prompts=1, prompt=128, samples=8, shortest=8, longest=32),
            (shared, packed, padded) if dtype == "float32" else (shared,),
        ),
        "8 × (512 + 128)": (
            group_batch(preamble=0, prompts=1, prompt=512, samples=8, shortest=128, longest=128),
            (shared,),
        ),
        "8 prompts × 8, examples (144 + 20 + 3 to 12)": (
            group_batch(preamble=144, prompts=8, prompt=20, samples=8, shortest=3, longest=12),
            (shared,),
        ),
    }
    rows: list[dict[str, Any]] = []
    ceilings = []
    for name, (batch, ways) in batches.items():
        step = steps_of(model, batch)
        flops = training_flops(model.architecture, shared(*batch))
        step(shared(*batch))  # first use of everything
        seconds: dict[str, list[float]] = {way.__name__: [] for way in ways}
        for _ in range(3):
            for way in ways:
                ceilings.append(matmul_gflops(dtype))
                seconds[way.__name__].append(step(way(*batch)))
        for way in ways:
            took = median_of(seconds[way.__name__])
            computed, unique = (sum(r.num_tokens for r in w(*batch)) for w in (way, shared))
            rows.append(
                {
                    "dtype": dtype,
                    "batch": name,
                    "way": way.__name__,
                    "tokens": computed,
                    "seconds": took,
                    "unique_per_s": unique / took,
                    "gflops": flops / took / 1e9,
                }
            )
    return [row | {"ceiling": max(ceilings), "share": row["gflops"] / max(ceilings)} for row in rows]


def main() -> None:
    options = parser(__doc__).parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0)))))
    rows = measure("float32")
    if cpu_multiplies_bfloat16():
        # FSDP2, which keeps the float32 weights, wants a process group.
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        rows += measure("bfloat16")
    report(
        "trainer_step",
        rows,
        columns={
            "dtype": "dtype",
            "batch": "prompts and responses, tokens",
            "way": "way",
            "tokens": "tokens computed:,",
            "seconds": "s:.2f",
            "unique_per_s": "unique tokens/s:,.0f",
            "gflops": "useful GFLOP/s:.1f",
            "ceiling": "ceiling:.0f",
            "share": "reached:.0%",
        },
        json_path=options.json,
        threads=torch.get_num_threads(),
    )


if __name__ == "__main__":
    main()
