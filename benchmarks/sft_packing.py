"""Trained tokens a second of fine-tuning SmolLM2-135M on short samples: packed, each in a row of its own, and padded.

    OMP_NUM_THREADS=2 python -m benchmarks.sft_packing [--samples 32] [--json FILE]

The samples are worked sums, as apps/sft/smollm2_135m.yaml trains them (about 70 tokens), and the same behind user turns
of evenly spread lengths, as conversations have them. "packed" is `training.packing: true`, common beginnings once;
"alone" is `training.packing: false`, which computes no padding either; "padded" computes the rectangle of the longest
sample, as other trainers do without packing. One step is forward, backward, clipping and AdamW, float32. Medians of
three, the ways alternating.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoTokenizer

from benchmarks.report import SMOLLM2, median_of, parser, report
from benchmarks.trainer_step import Batch, padded, shared, steps_of
from forge.batching import make_document_batch
from forge.config import ParallelismConfig, SFTConfig, load_config
from forge.data.documents import Document, build_documents
from forge.losses import SFTLoss
from forge.models.build import load_model
from forge.packing import PackedRow, pack

CONFIG = Path(__file__).parents[1] / "apps" / "sft" / "smollm2_135m.yaml"
LONGEST = 256  # tokens that are put in front of an answer at most, in the uneven batch


def alone(inputs: dict[str, torch.Tensor], targets: dict[str, torch.Tensor]) -> list[PackedRow]:
    return pack(inputs, targets, max_tokens=1, share_prefixes=False, keep_last=False)


def worked_sums(count: int) -> list[Document]:
    config = load_config(SFTConfig, CONFIG)
    stream, _ = build_documents(
        config.dataset,
        eval=config.eval,
        tokenizer=AutoTokenizer.from_pretrained(SMOLLM2),
        seq_len=config.training.seq_len,
        seed=0,
    )
    return list(itertools.islice(stream, count))


def uneven(documents: list[Document]) -> list[Document]:
    """The same answers behind user turns of 0 to `LONGEST` more tokens, each of its own."""
    rng = random.Random(0)
    longer = []
    for number, document in enumerate(documents):
        more = [rng.randrange(1000, 40_000) for _ in range(LONGEST * number // (len(documents) - 1))]
        trained = [False] * len(more) + document.trained
        longer.append(Document(id=document.id, token_ids=more + document.token_ids, trained=trained))
    return longer


def one_rank(documents: list[Document]) -> Batch:
    inputs, targets = make_document_batch(documents, ranks=1, pad_id=0)
    return inputs[0], targets[0]


def main() -> None:
    command_line = parser(__doc__)
    command_line.add_argument("--samples", type=int, default=32)
    options = command_line.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0)))))
    model = load_model(
        str(SMOLLM2), parallelism=ParallelismConfig(), dtype="float32", device="cpu", seq_len=1024, trainable=True
    )
    sums = worked_sums(options.samples)
    batches = {"worked sums": one_rank(sums), "behind 0 to 256 tokens": one_rank(uneven(sums))}
    ways: dict[str, Callable[..., list[PackedRow]]] = {"packed": shared, "alone": alone, "padded": padded}
    rows = []
    for name, batch in batches.items():
        step = steps_of(model, batch, loss=SFTLoss())
        trained = int(batch[1]["padding_mask"].sum())
        step(shared(*batch))  # first use of everything
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(3):
            for way, make in ways.items():
                seconds[way].append(step(make(*batch)))
        packed_seconds = median_of(seconds["packed"])
        for way, make in ways.items():
            took = median_of(seconds[way])
            rows.append(
                {
                    "batch": f"{options.samples} {name}",
                    "way": way,
                    "computed": sum(row.num_tokens for row in make(*batch)),
                    "trained": trained,
                    "seconds": took,
                    "trained_per_s": trained / took,
                    "slower": took / packed_seconds,
                }
            )
    report(
        "sft_packing",
        rows,
        columns={
            "batch": "samples",
            "way": "way",
            "computed": "tokens computed:,",
            "trained": "trained:,",
            "seconds": "s:.2f",
            "trained_per_s": "trained tokens/s:,.0f",
            "slower": "time, packed = 1:.2f",
        },
        json_path=options.json,
        threads=torch.get_num_threads(),
    )


if __name__ == "__main__":
    main()
