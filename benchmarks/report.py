"""What every benchmark does at its end: one table for people, one JSON file with the machine it was measured on."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from forge.observability import environment

SMOLLM2 = Path(os.environ.get("FORGE_CACHE", "~/.cache/forge")).expanduser() / "SmolLM2-135M-Instruct"


def parser(documentation: str | None) -> argparse.ArgumentParser:
    """A command line with `--json`; its help is the benchmark's docstring."""
    made = argparse.ArgumentParser(description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path, help="also write the rows, and the machine, into this file")
    return made


def report(
    name: str, rows: Sequence[Mapping[str, Any]], *, columns: Mapping[str, str], json_path: Path | None, **more: Any
) -> None:
    """Prints the rows as a table, and writes them as JSON.

    Args:
        columns: key of a row → heading and format, such as {"seconds": "seconds:.2f"}.
        more: written into the JSON as it is.
    """
    table = Table(*(heading.partition(":")[0] for heading in columns.values()), title=name)
    for row in rows:
        table.add_row(*(_cell(row.get(key), heading.partition(":")[2]) for key, heading in columns.items()))
    Console(width=150).print(table)
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        content = {"benchmark": name, "machine": machine(), "rows": list(rows), **more}
        json_path.write_text(json.dumps(content, indent=2) + "\n")


def machine() -> dict[str, Any]:
    """What the numbers depend on."""
    return {
        "cpu": environment.cpu(),
        "gpus": environment.gpus(),
        "load_average": os.getloadavg()[0],
        "versions": environment.package_versions(),
        "git": environment.git_state(Path(__file__).parent),
        "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def median_of(values: Sequence[float]) -> float:
    return statistics.median(values)


def _cell(value: Any, digits: str) -> str:
    if value is None:
        return "-"
    return format(value, digits) if digits else str(value)
