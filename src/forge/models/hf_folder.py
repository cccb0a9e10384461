"""Hugging Face model folders: finding one, reading its config and weights, writing one that others load."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge.types import UserError

if TYPE_CHECKING:
    import torch

MAX_SHARD_BYTES = 5_000_000_000  # the size at which transformers starts a new file
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "merges.txt", "vocab.txt", "tokenizer.model")
_TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)


class ModelNotFound(UserError):
    """There is no such model, or not all of it."""


def resolve_folder(model: str) -> Path:
    """The local folder of a model: itself, or the hub's copy, downloaded into the hub's cache once.

    Args:
        model: a local folder, a hub id such as `Qwen/Qwen3-1.7B`, or `hf://` and a hub id.

    Raises:
        ModelNotFound: no such folder, or the hub cannot be reached, or has no such model.
    """
    hub_id = model.removeprefix("hf://")
    folder = Path(model).expanduser()
    if hub_id == model and folder.exists():
        if not (folder / "config.json").is_file():
            raise ModelNotFound(f"model {model!r} is not a Hugging Face model folder: it has no config.json.")
        return folder
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", hub_id):
        raise ModelNotFound(f"model folder {model!r} does not exist. Give a local folder or a hub id (owner/name).")
    # Imported here: the hub client takes 0.3 s, and a local folder does not need it.
    from httpx import HTTPError
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(_HUB_FILES)))
    except (HTTPError, OSError, ValueError) as error:  # no network, no such model, no access, a disk that is full
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise ModelNotFound(
            f"model {model!r} is neither a local folder nor available from the Hugging Face hub: {reason}. "
            f"Give the path of a downloaded folder, or check the name, the network and the access token."
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    """The content of `config.json`.

    Raises:
        ModelNotFound: it is missing or is not a JSON object.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelNotFound(f"{path} does not exist: {folder} is not a Hugging Face model folder.") from None
    except (OSError, ValueError) as error:
        raise ModelNotFound(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelNotFound(f"{path} must hold a JSON object, got {type(config).__name__}.")
    return config


class WeightFiles:
    """The safetensors of a folder, one file or many with an index; only what is asked for is read.

    Use it as a context manager: the files stay mapped until it is left.

    Raises:
        ModelNotFound: there are no safetensors, or the index names a file that is missing, or a file is torn.
    """

    def __init__(self, folder: Path) -> None:
        self._files = ExitStack()
        self._handle_of: dict[str, Any] = {}
        for path in _weight_paths(folder):
            self._open(path)

    def _open(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            handle = self._files.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise ModelNotFound(
                f"{path} cannot be read ({error}): the file is missing or torn, fetch it again."
            ) from error
        for name in handle.keys():  # noqa: SIM118 - not a mapping
            self._handle_of[name] = handle

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(self, *exc: object) -> None:
        self._files.close()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name to shape of everything there is, from the headers alone."""
        return {name: tuple(handle.get_slice(name).get_shape()) for name, handle in self._handle_of.items()}

    def read(self, name: str, *, offsets: Iterable[int], shape: Iterable[int]) -> torch.Tensor:
        """The box of `shape` at `offsets` of one tensor, in the file's dtype, on the CPU."""
        box = tuple(slice(start, start + size) for start, size in zip(offsets, shape, strict=True))
        return self._handle_of[name].get_slice(name)[box]


def _weight_paths(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if index.is_file():
        return [
            folder / name for name in sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        ]
    if single.is_file():
        return [single]
    pickled = sorted(path.name for path in folder.glob("*.bin"))
    hint = (
        f"It has {', '.join(pickled)}: pickled weights are not loaded, convert them with save_pretrained."
        if pickled
        else "Training does not start from random weights: put the weights there, or give another model."
    )
    raise ModelNotFound(f"{folder} has a config.json but no weights (model.safetensors or its index). {hint}")


def plan_shards(sizes: Mapping[str, int], *, max_bytes: int = MAX_SHARD_BYTES) -> list[list[str]]:
    """Names into files of at most `max_bytes` each, in order; a larger tensor gets a file of its own.

    Example:
        >>> plan_shards({"a": 3, "b": 2, "c": 9}, max_bytes=5)
        [['a', 'b'], ['c']]
    """
    shards: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not shards or size > room:
            shards.append([])
            room = max_bytes
        shards[-1].append(name)
        room -= size
    return shards


def write_weights(
    folder: Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    sizes: Mapping[str, int],
    max_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write named tensors as safetensors, holding one file's worth in memory at a time.

    Args:
        tensors: name and value, in the order of `sizes`.
        sizes: name to bytes; decides how many files there are before the first is written.
    """
    from safetensors.torch import save_file

    shards = plan_shards(sizes, max_bytes=max_bytes)
    stream = iter(tensors)
    weight_map = {}
    for number, names in enumerate(shards, start=1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(_take(stream, names), folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(names, file))
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _take(stream: Iterator[tuple[str, torch.Tensor]], names: list[str]) -> dict[str, torch.Tensor]:
    taken = {}
    for expected in names:
        name, tensor = next(stream)
        assert name == expected, f"weights came out of order: {name} instead of {expected}"
        taken[name] = tensor.cpu().contiguous()
    return taken


def write_config(folder: Path, config: Mapping[str, Any], *, source: Path, dtype: str) -> None:
    """Write `config.json` with the dtype of the weights; copy tokenizer and generation settings from `source`."""
    # transformers 5 says dtype; vllm and older readers still look for torch_dtype where a checkpoint has it.
    written = {**config, "dtype": dtype, **({"torch_dtype": dtype} if "torch_dtype" in config else {})}
    (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
