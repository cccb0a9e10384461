"""vLLM as the engine of `engine_loop.EngineLoop`: sequences in, sampled tokens with log-probabilities out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing.connection
import os
import shutil
import tempfile
import threading
import warnings
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from forge.actors import _patches_vllm
from forge.actors.engine_loop import Finished, Request
from forge.actors.vllm_setup import kv_cache_bytes, resolve_dtype
from forge.service.scratch import shared_name

logger = logging.getLogger(__name__)

_CPU_STEP_TOKENS = 512
"""Prompt tokens in one step on the CPU. More does not make the matrix products faster there, and nobody else decodes,
and no weights are swapped, while a long step lasts."""


_LEAST_GPU_SHARE = 0.1
"""Of a GPU that is shared with a trainer: what the engine needs to be of use."""


@dataclass(kw_only=True, slots=True)
class EngineSettings:
    """What a VllmEngine is built from."""

    model: str
    """A local folder or a hub id."""
    dtype: str = "auto"
    device: str = "cpu"
    tensor_parallel: int = 1
    max_model_len: int
    """Tokens of prompt and response together."""
    max_num_seqs: int = 64
    """Sequences that are generated side by side; more wait."""
    seed: int = 0
    gpu_memory_utilization: float = 0.9
    """The part of a GPU's memory that vLLM may take; not used on the CPU."""
    reserved_bytes: int = 0
    """What a trainer on the same GPU holds while the engine is awake; above 0 the engine can sleep."""
    trust_remote_code: bool = False
    version: int = 0
    """What the weights in the model folder are called."""


class VllmEngine:
    """An `engine_loop.Engine` that owns a vLLM engine in this process, and its workers elsewhere if there are several.

    Log-probabilities are those of the distribution that was sampled from: temperature and top-p applied.
    """

    def __init__(self, settings: EngineSettings) -> None:
        from vllm.v1.engine.llm_engine import LLMEngine

        self._settings = settings
        self.version = settings.version
        self._salt = 0
        config = _vllm_config(settings)
        with warnings.catch_warnings():  # its imports use deprecated names
            warnings.simplefilter("ignore", FutureWarning)
            self._llm = LLMEngine.from_vllm_config(config, disable_log_stats=True)
        self._rendezvous = Path(self._llm.collective_rpc("forge_rendezvous")[0].removeprefix("file://"))
        # On a CPU its workers exchange tensors through shared memory, which all have mapped by now: without a name it
        # goes when they do, however they end.
        for name in Path("/dev/shm").glob(f"{self._rendezvous.name}-*"):
            name.unlink(missing_ok=True)
        if settings.device == "cpu":
            self._llm.collective_rpc("forge_patch")
        self._llm.set_weight_version(str(self.version))
        self._requests: dict[str, _InFlight] = {}
        self._drained: list[Finished] = []
        self._closing = False
        if settings.tensor_parallel > 1:
            threading.Thread(target=self._end_with_the_workers, name="forge-vllm-workers", daemon=True).start()
        self._reseed()

    @property
    def tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer."""
        return self._llm.get_tokenizer()

    @property
    def busy(self) -> bool:
        return bool(self._drained) or bool(self._llm.has_unfinished_requests())

    def add(self, request: Request) -> None:
        from vllm import SamplingParams
        from vllm.exceptions import VLLMValidationError
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p,
            max_tokens=request.max_new_tokens,
            stop=list(request.stop),
            stop_token_ids=list(request.stop_token_ids),
            logprobs=0,  # that of the sampled token alone
            flat_logprobs=True,
            detokenize=bool(request.stop),  # otherwise the text is made once, at the end
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )
        prompt = tokens_input(request.prompt_ids, cache_salt=self._cache_salt())
        try:
            internal = self._llm.add_request(request.id, prompt, params)
        except VLLMValidationError as error:  # such as a token id outside of the vocabulary; no ValueError by itself
            raise ValueError(str(error)) from None
        self._requests[request.id] = _InFlight(internal_id=internal, has_text=bool(request.stop))

    def abort(self, request_id: str) -> None:
        known = self._requests.pop(request_id, None)
        if known is not None:
            self._llm.abort_request([known.internal_id], internal=True)

    def step(self) -> list[Finished]:
        drained, self._drained = self._drained, []
        return drained + self._step()

    def counts(self) -> tuple[int, int]:
        running, waiting = self._scheduler.get_request_counts()
        return int(running), int(waiting)

    def start_afresh(self, key: int) -> None:
        """Nothing of the past has an influence any more: no cached prefix, no state of the random numbers. What is
        sampled next is a function of weights, seed, `key` and the requests, down to the last bit on a CPU."""
        self._forget_prefixes()
        self._reseed(key)

    def load_weights(self, version: int, weights: dict[str, Tensor] | str) -> None:
        """Puts other weights in place of the present ones; what is in flight keeps its tokens and goes on with them.

        The keys and values that were computed so far stay with the requests they belong to, so the next tokens of those
        see a past that the older weights encoded. Nobody else does: a request that comes later, or has not started,
        does not find them in the prefix cache.

        Args:
            version: how the weights are called from now on.
            weights: what `staged` made of them.
        """
        self._drain()
        asleep = bool(self._llm.is_sleeping())
        if asleep:
            self._llm.wake_up(tags=["weights"])
        self._llm.collective_rpc("forge_load_weights", args=(weights,))
        if asleep:  # not before: there may be no room for what loading takes beside the KV cache
            self._llm.wake_up(tags=["kv_cache"])
        self.version = version
        self._llm.set_weight_version(str(version))
        self._forget_prefixes()
        self._reseed()

    def sleep(self) -> None:
        """Frees the memory of weights and KV cache, whose content is lost, until `load_weights`; nothing is in flight.

        On the CPU there is nothing to free: whoever does not step takes no core.
        """
        if self._settings.reserved_bytes:
            self._drain()
            self._llm.sleep(level=2)

    def close(self) -> None:
        self._closing = True
        try:
            self._llm.engine_core.shutdown()
        finally:
            self._rendezvous.unlink(missing_ok=True)  # vLLM leaves it

    def _end_with_the_workers(self) -> None:
        """Waits for the first of vLLM's worker processes to end, and ends this one with it: the replica dies as a
        whole, which is what the service notices and mends."""
        workers = [worker.proc for worker in self._llm.engine_core.engine_core.model_executor.workers]
        ended = multiprocessing.connection.wait([worker.sentinel for worker in workers])
        if not self._closing:
            [died] = [worker for worker in workers if worker.sentinel == ended[0]]
            died.join()
            logger.error("vLLM's worker process %d ended with status %s.", died.pid, died.exitcode)
            os._exit(1)

    @property
    def _scheduler(self) -> Any:
        return self._llm.engine_core.engine_core.scheduler

    def _step(self) -> list[Finished]:
        return [self._finished(output) for output in self._llm.step() if output.finished]

    def _finished(self, output: Any) -> Finished:
        known = self._requests.pop(output.request_id)
        [completion] = output.outputs
        if completion.finish_reason not in ("stop", "length", "abort"):
            raise RuntimeError(f"vLLM ended request {output.request_id} with {completion.finish_reason!r}.")
        versions = [int(span.version) for span in completion.weight_versions or []] or [self.version]
        return Finished(
            id=output.request_id,
            token_ids=list(completion.token_ids),
            logprobs=list(completion.logprobs.logprobs),
            text=completion.text if known.has_text else None,
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
            versions=(min(versions), max(versions)),
            cached_tokens=output.num_cached_tokens or 0,
        )

    def _drain(self) -> None:
        """Waits for the steps that are under way. On GPUs vLLM schedules one step ahead of the results, and would
        write the new version on tokens of the old weights."""
        from vllm.v1.core.sched.interface import PauseState

        core = self._llm.engine_core.engine_core
        if not core.batch_queue:
            return
        core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        try:
            while core.batch_queue:
                self._drained += self._step()
        finally:
            core.scheduler.set_pause_state(PauseState.UNPAUSED)

    def _forget_prefixes(self) -> None:
        """Makes the prefix cache of the old weights unfindable, by a salt that goes into the hash of every prompt.

        vLLM's own `reset_prefix_cache` refuses while any request runs, or has all running ones computed again, which
        costs a whole prompt each. A waiting request was hashed already, so it gets the new salt here.
        """
        self._salt += 1
        for request in self._scheduler.waiting:
            request.cache_salt = self._cache_salt()
            request.block_hashes.clear()
            request.update_block_hashes()

    def _cache_salt(self) -> str:
        return f"weights-{self._salt}"

    def _reseed(self, key: int = 0) -> None:
        """Sampling depends on the seed, the weights' version and the requests since, not on what came before: so a run
        that was resumed samples as one that was not."""
        mixed = zlib.crc32(f"{self._settings.seed}/{self.version}/{key}".encode())
        self._llm.collective_rpc("forge_seed", args=(mixed,))


@dataclass(kw_only=True, slots=True)
class _InFlight:
    internal_id: str
    has_text: bool
    """Whether vLLM makes the text, which it does to look for stop strings."""


def _vllm_config(settings: EngineSettings) -> Any:
    """vLLM's configuration: exact log-probabilities, shared prompts, and on the CPU what was measured to be fastest."""
    from vllm import EngineArgs
    from vllm.platforms import current_platform

    on_cpu = settings.device == "cpu"
    if on_cpu != current_platform.is_cpu():
        raise ValueError(
            f"the generator is to run on {settings.device!r}, but the vLLM that is installed is built for "
            f"{current_platform.device_type!r}. Set services.generator.with_gpus to match, or install the other build."
        )
    several = settings.tensor_parallel > 1
    chosen: dict[str, Any] = {
        "model": settings.model,
        "dtype": resolve_dtype(settings.dtype, device=settings.device),
        "tensor_parallel_size": settings.tensor_parallel,
        "distributed_executor_backend": "mp" if several else "uni",
        "worker_extension_cls": "forge.actors.vllm_worker.WorkerExtension",
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "seed": settings.seed,
        "trust_remote_code": settings.trust_remote_code,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if on_cpu:
        _patches_vllm.apply()
        _avoid_model_inspection(settings)
        chosen |= {
            "enforce_eager": True,  # compiled, SmolLM2 decodes no faster, and the first start takes 90 s more CPU time
            "compilation_config": {"custom_ops": ["all"]},  # vLLM's own kernels in place of strings of torch ones
            # Workers of their own choose their blocks before we can patch them.
            "block_size": 32 if several else _patches_vllm.SMALL_BLOCK,
            "max_num_batched_tokens": max(_CPU_STEP_TOKENS, settings.max_num_seqs),
        }
    else:
        chosen["gpu_memory_utilization"] = _gpu_share(settings)
        chosen["enable_sleep_mode"] = settings.reserved_bytes > 0
    config = EngineArgs(**chosen).create_engine_config()
    if on_cpu and config.cache_config.kv_cache_memory_bytes is None:  # else VLLM_CPU_KVCACHE_SPACE says how much
        config.cache_config.kv_cache_memory_bytes = kv_cache_bytes(config)
    return config


def _gpu_share(settings: EngineSettings) -> float:
    """The part of the GPU that vLLM may take, beside a trainer if there is one."""
    if not settings.reserved_bytes:
        return settings.gpu_memory_utilization
    import torch

    total = torch.cuda.get_device_properties(0).total_memory
    share = settings.gpu_memory_utilization - settings.reserved_bytes / total
    if share < _LEAST_GPU_SHARE:
        gib = 2**30
        raise ValueError(
            f"trainer and generator do not fit on one GPU of {total / gib:.0f} GiB: the trainer keeps "
            f"{settings.reserved_bytes / gib:.0f} GiB, which leaves the generator {share:.0%}. Give the generator a "
            "GPU of its own (services.generator.colocate: false), or spread the trainer over more processes."
        )
    return share


def _avoid_model_inspection(settings: EngineSettings) -> None:
    """Imports the model's class here; vLLM would import itself in a second process, 14 s, to look at the class."""
    from transformers import AutoConfig
    from vllm import ModelRegistry

    config = AutoConfig.from_pretrained(settings.model, trust_remote_code=settings.trust_remote_code)
    for name in config.architectures or []:
        if name in ModelRegistry.models:
            ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


@contextlib.asynccontextmanager
async def staged(weights: dict[str, Tensor], *, tensor_parallel: int) -> AsyncIterator[dict[str, Tensor] | str]:
    """The weights in the form in which all workers can have them: as they are for a worker in this process, as a file
    in shared memory for workers in others, which is gone when the block ends."""
    if tensor_parallel == 1:
        yield weights
        return
    from safetensors.torch import save_file

    size = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    folder = tempfile.mkdtemp(prefix=shared_name(), dir=_roomy_folder(size))
    try:
        path = os.path.join(folder, "weights.safetensors")
        await asyncio.to_thread(save_file, {name: tensor.contiguous() for name, tensor in weights.items()}, path)
        yield path
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def checkpoint_shapes(model: str) -> dict[str, tuple[int, ...]] | None:
    """Names and shapes of the tensors in a local model folder; None for a model that is not one."""
    from safetensors import safe_open

    files = sorted(Path(model).glob("*.safetensors"))
    shapes: dict[str, tuple[int, ...]] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return shapes or None


def check_weights(weights: dict[str, Tensor], expected: dict[str, tuple[int, ...]]) -> None:
    """Refuses weights that would leave a part of the model as it was.

    Raises:
        ValueError: a tensor is missing, unknown, or of another shape than in the checkpoint.
    """
    missing = expected.keys() - weights.keys()
    unknown = weights.keys() - expected.keys() - {"lm_head.weight"}  # tied embeddings may be given twice
    if missing or unknown:
        raise ValueError(
            f"the new weights are not those of this model: {len(missing)} tensors are missing ({_some(missing)}) and "
            f"{len(unknown)} are unknown ({_some(unknown)}). Publish all weights under their Hugging Face names."
        )
    for name, shape in expected.items():
        if tuple(weights[name].shape) != shape:
            raise ValueError(
                f"{name} has the shape {tuple(weights[name].shape)}, but {shape} in the model's checkpoint."
            )


def _some(names: set[str]) -> str:
    return ", ".join(sorted(names)[:3]) or "none"


def _roomy_folder(size: int) -> str:
    """Shared memory if `size` bytes fit into it with room to spare, else the folder for temporary files."""
    shm = "/dev/shm"
    if os.path.isdir(shm) and os.access(shm, os.W_OK) and shutil.disk_usage(shm).free > 1.2 * size:
        return shm
    return tempfile.gettempdir()
