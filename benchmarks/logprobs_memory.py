"""Peak memory of log-probabilities and entropies, forward and backward, against the sequence length.

    python -m benchmarks.logprobs_memory [--json FILE]

Scores [8, 2048] tokens of a vocabulary of 151,936, then twice as many, each in a process of its own, and prints the
peak resident memory above what Python, torch, hidden states and their gradient take. Whole float32 logits would be
10 GB. Exit status 1 if the peak passes 1.5 GiB or grows by 10 % or more. The gradient of both log-probabilities
and entropies is taken. Two to four minutes on one core.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from typing import Any

BATCH, LENGTH, VOCABULARY, HIDDEN = 8, 2048, 151_936, 64
LIMIT_BYTES = 1.5 * 2**30
LIMIT_GROWTH = 0.10


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(length: int) -> None:
    """Runs in the child: prints the peak above the inputs, in bytes, and the CPU seconds."""
    import torch

    from forge.logprobs import score_tokens

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    tokens = BATCH * length
    hidden = torch.randn(tokens, HIDDEN, generator=generator, requires_grad=True)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator).requires_grad_()
    targets = torch.randint(VOCABULARY, (tokens,), generator=generator)
    hidden.grad = torch.zeros_like(hidden)
    small = torch.ones(64, 64)
    small @ small  # loads the matrix library
    before, start = peak_bytes(), time.process_time()
    logprobs, entropies = score_tokens(hidden, weight, targets, temperature=0.7, want_entropy=True)
    (logprobs.mean() + 0.01 * entropies.mean()).backward()
    print(peak_bytes() - before, time.process_time() - start)


def main() -> int:
    from benchmarks.report import parser, report

    options = parser(__doc__).parse_args()
    rows: list[dict[str, Any]] = []
    for length in (LENGTH, 2 * LENGTH):
        command = [sys.executable, __file__, str(length)]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        shape = f"[{BATCH}, {length}] x {VOCABULARY:,}"
        rows.append({"logits": shape, "peak_mib": int(output[0]) / 2**20, "cpu_s": float(output[1])})
    peaks = [row["peak_mib"] for row in rows]
    growth = peaks[1] / peaks[0] - 1
    columns = {"logits": "logits", "peak_mib": "peak MiB:.0f", "cpu_s": "CPU s:.0f"}
    report("logprobs_memory", rows, columns=columns, json_path=options.json, growth=growth)
    print(f"growth when the sequence doubles: {growth:.1%}")
    return 0 if max(peaks) < LIMIT_BYTES / 2**20 and growth < LIMIT_GROWTH else 1


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].isdecimal():
        measure(int(sys.argv[1]))
    else:
        sys.exit(main())
