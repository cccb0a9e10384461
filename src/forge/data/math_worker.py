"""The process that compares mathematical expressions, so that a hostile one costs a process and not the run.

Started by `forge.data.math_judge` as a script; reads one JSON object a line from stdin, writes one a line to stdout:

    {"target": "x^2-1", "answer": "(x-1)(x+1)", "seconds": 2.0}  →  {"equal": true}

Waits for stdin; ends when that ends, which it does when its parent does, however the parent died. While it computes,
the system's own timer kills it, even inside one endless operation of the interpreter.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from typing import Any

MAX_MEMORY = 2 << 30  # bytes of address space; sympy and math-verify take 0.3 GiB


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not be taken for an answer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    limit, hard = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY or limit > MAX_MEMORY:
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, hard))
    is_equal("1", "1")  # imports math-verify and builds its parser, outside the time of the first job
    reply(answers, {"ready": True})
    for line in sys.stdin:
        job = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, job["seconds"])
        try:
            equal = is_equal(job["target"], job["answer"])
        except (Exception, RecursionError, MemoryError):
            equal = False  # what cannot be read is not equal to the target
        signal.setitimer(signal.ITIMER_PROF, 0)
        reply(answers, {"equal": equal})


def is_equal(target: str, answer: str) -> bool:
    """Whether math-verify finds the two expressions equal. Without its own time limits, which need a main thread."""
    from math_verify import LatexExtractionConfig, parse, verify

    latex = [LatexExtractionConfig()]
    parsed = [
        parse(f"${text}$", extraction_config=latex, fallback_mode="no_fallback", parsing_timeout=None)
        for text in (target, answer)
    ]
    return all(parsed) and bool(verify(*parsed, timeout_seconds=None))


def reply(stream: Any, message: dict[str, Any]) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()


if __name__ == "__main__":
    main()
