"""Generator: samples completions with vLLM, and takes new weights while it does."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
import zlib
from collections.abc import AsyncIterator
from typing import Any, Protocol

from torch import Tensor

from forge.actors.engine_loop import EngineLoop, Finished, Request
from forge.actors.host_memory import keep_freed_memory
from forge.actors.vllm_engine import EngineSettings, VllmEngine, check_weights, checkpoint_shapes, staged
from forge.actors.vllm_setup import configure_environment
from forge.service import ForgeActor, repeated_on_restart
from forge.types import Completion
from forge.weights import UnknownVersion


class WeightSource(Protocol):
    """Where new weights come from; `forge.weights.WeightStore` is one."""

    async def fetch(self, version: int) -> dict[str, Tensor]:
        """All tensors of a version under their Hugging Face names. Raises UnknownVersion where it is gone."""

    async def versions(self) -> list[int]:
        """The versions that exist, the one published last at the end."""


class Generator(ForgeActor):
    """Samples from the policy.

    Hundreds of calls to `generate` may be under way: vLLM batches them, on a thread of its own, with those that are
    already running. `update_weights` replaces the weights between two steps.

    Args:
        model: a local Hugging Face folder or a hub id.
        dtype: "auto", "float32" or "bfloat16"; auto is bfloat16 where the hardware multiplies it, else float32.
        device: "cpu" or "cuda".
        tensor_parallel: processes that share the model; more than one are started by vLLM, next to this one.
        max_model_len: tokens of prompt and response together.
        max_num_seqs: sequences that are generated side by side; more wait for a place.
        seed: the same seed, versions and requests give the same samples, up to how requests met in batches (see
            `hold`). Replicas of a service are told apart by their names, so that they do not all say the same.
        gpu_memory_utilization: the part of a GPU's memory that vLLM may take.
        reserved_bytes: of the same GPU, what a trainer on it holds while this generator is awake; 0 for a GPU of its
            own. More than 0 prepares for `sleep` to free the memory.
        weights: where `update_weights` fetches from; None for a generator whose weights never change.
        version: what the weights in the model folder are called.
        trust_remote_code: whether code from the model's repository may run.

    Example:
        >>> generator = Generator(model="models/tiny", max_model_len=512)
        >>> await generator.setup()
        >>> completions = await generator.generate("2 + 2 =", n=4, max_new_tokens=8)
        >>> await generator.shutdown()
    """

    def __init__(
        self,
        *,
        model: str,
        dtype: str = "auto",
        device: str = "cpu",
        tensor_parallel: int = 1,
        max_model_len: int,
        max_num_seqs: int = 64,
        seed: int = 0,
        gpu_memory_utilization: float = 0.9,
        reserved_bytes: int = 0,
        weights: WeightSource | None = None,
        version: int = 0,
        trust_remote_code: bool = False,
    ) -> None:
        self._settings = EngineSettings(
            model=model,
            dtype=dtype,
            device=device,
            tensor_parallel=tensor_parallel,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            seed=_replica_seed(seed),
            gpu_memory_utilization=gpu_memory_utilization,
            reserved_bytes=reserved_bytes,
            trust_remote_code=trust_remote_code,
            version=version,
        )
        self._weights = weights
        self._version = version
        self._loop = EngineLoop(self._make_engine, name="forge-generator")
        self._update_lock = asyncio.Lock()
        self._awake = asyncio.Event()
        self._awake.set()
        self._calls = 0  # of `generate`, under way
        self._idle = asyncio.Event()
        self._idle.set()
        self._ids = itertools.count()
        self._generated_tokens = 0
        self._prompt_tokens = 0
        self._cached_prompt_tokens = 0
        self._tokenizer: Any = None

    async def setup(self) -> None:
        """Starts the engine: 15 to 25 s for a small model on two cores, most of it imports."""
        self._expected = checkpoint_shapes(self._settings.model)
        await self._loop.start()
        self._tokenizer = await self._loop.call(lambda engine: engine.tokenizer)

    async def generate(
        self,
        prompt: str | list[int],
        *,
        n: int = 1,
        temperature: float = 1.0,
        top_p: float = 1.0,
        max_new_tokens: int = 16,
        stop: tuple[str, ...] | list[str] = (),
        stop_token_ids: tuple[int, ...] | list[int] = (),
    ) -> list[Completion]:
        """Samples `n` completions of one prompt.

        Args:
            prompt: token ids; or text with its chat template already rendered: no special token is added.
            n: how many. They share the work on the prompt.
            temperature: what the logits are divided by; 0 is greedy.
            top_p: sample from the smallest set of tokens with this much probability together.
            max_new_tokens: a completion that reaches it has `finish_reason` "length".
            stop: strings that end a completion. The text is cut before the string; `token_ids` are not.
            stop_token_ids: tokens that end a completion, besides the model's own end-of-turn tokens.

        Returns:
            n completions. `token_ids` holds what was sampled, the ending token included, and `logprobs` the
            log-probability of each under the distribution it was sampled from (for greedy: at temperature 1). Metadata:
            `policy_version` and `policy_version_max` (the oldest and newest weights that wrote one of the tokens),
            `finish_reason` ("stop", "length"), `stop_reason` (the stop string or token id that ended it; None for the
            model's end of turn).

        Raises:
            ValueError: a setting makes no sense, or the prompt leaves no room for a token.
            EngineStopped: vLLM failed, now or earlier (the cause is attached), or the generator was shut down.
        """
        _check_sampling(n=n, temperature=temperature, top_p=top_p, max_new_tokens=max_new_tokens)
        prompt_ids = self._prompt_ids(prompt)
        requests = [
            Request(
                id=str(next(self._ids)),
                prompt_ids=prompt_ids,
                temperature=temperature,
                top_p=top_p,
                max_new_tokens=max_new_tokens,
                stop=tuple(stop),
                stop_token_ids=tuple(stop_token_ids),
            )
            for _ in range(n)
        ]
        async with self._under_way():
            finished = await self._loop.generate(requests)
        self._prompt_tokens += n * len(prompt_ids)
        self._cached_prompt_tokens += sum(result.cached_tokens for result in finished)
        self._generated_tokens += sum(len(result.token_ids) for result in finished)
        return [self._completion(result) for result in finished]

    @repeated_on_restart
    async def update_weights(self, version: int, *, rollback: bool = False) -> dict[str, float]:
        """Fetches a version and swaps it in. Generation goes on while it is fetched, and pauses for the swap.

        Completions in flight keep their tokens and continue under the new weights; keys and values that the old weights
        computed for them stay. The prefix cache of the old weights is dropped. Concurrent calls run one after another.

        A sleeping generator wakes with them.

        Args:
            version: the one that is in place, or an older one, changes nothing: a newer call has overtaken this one.
                Where it was dropped meanwhile, as it may be before a replacement has started, the newest is taken.
                (In its sleep it has none in place.)
            rollback: take an older version all the same, as after a trainer's restart from a checkpoint.

        Returns:
            seconds: {"fetch": ..., "swap": ...}; both 0 where nothing was to do.

        Raises:
            ValueError: the weights are not those of this model; the present ones stay.
            EngineStopped: vLLM failed.
        """
        if self._weights is None:
            raise RuntimeError("this generator was built without a weight store (weights=None); it cannot be updated.")
        async with self._update_lock:
            current = version == self._version or (version < self._version and not rollback)
            if current and (self._awake.is_set() or not self._settings.reserved_bytes):
                self._awake.set()  # on the CPU weights outlast the sleep
                return {"fetch": 0.0, "swap": 0.0}
            started = time.perf_counter()
            version, weights = await _fetch(self._weights, version)
            if self._expected is not None:
                check_weights(weights, self._expected)
            async with staged(weights, tensor_parallel=self._settings.tensor_parallel) as form:
                fetched = time.perf_counter()
                # A swap that breaks off leaves half of each version, so it ends the engine.
                await self._loop.call(lambda engine: engine.load_weights(version, form), fatal=True)
            self._version = version
            self._awake.set()
            return {"fetch": fetched - started, "swap": time.perf_counter() - fetched}

    async def sleep(self) -> None:
        """Gives the device up to the trainer, until `update_weights`; returns when nothing runs and memory is freed.

        Completions in flight are finished first; calls that come later wait. On a GPU weights and KV cache are gone
        then; on the CPU it is the cores that are free.
        """
        async with self._update_lock:
            self._awake.clear()
            await self._idle.wait()
            await self._loop.call(lambda engine: engine.sleep(), fatal=True)

    async def hold(self, key: int) -> None:
        """Gives up what is in flight, forgets cached prefixes, seeds sampling from `key`, and lets the requests that
        follow wait until `release`: so they begin together, and batches do not depend on when each arrived.

        That makes sampling exactly repeatable on a CPU, where the last bits of a log-probability depend on which
        sequences were computed side by side.
        """
        await self._loop.hold(key)

    async def release(self) -> None:
        """Begins with the requests that wait since `hold`, in the order in which they came."""
        await self._loop.release()

    async def stats(self) -> dict[str, float]:
        """Totals since the start, and how things stand.

        Of the completions that are done: `generated_tokens`, `prompt_tokens` (a prompt counts once for each of its
        samples) and `cached_prompt_tokens`, those among them that did not have to be computed. Seconds in the engine's
        steps and without anything to do: `busy_s`, `idle_s`. Sequences in flight: `running`, `waiting`. And the
        weights' `version`.
        """
        return {
            **self._loop.stats(),
            "generated_tokens": self._generated_tokens,
            "prompt_tokens": self._prompt_tokens,
            "cached_prompt_tokens": self._cached_prompt_tokens,
            "version": self._version,
        }

    async def shutdown(self) -> None:
        """Ends the engine, its thread and its workers; calls in flight raise EngineStopped."""
        await self._loop.stop()

    @contextlib.asynccontextmanager
    async def _under_way(self) -> AsyncIterator[None]:
        """Waits until the generator is awake, and keeps it so."""
        await self._awake.wait()
        self._calls += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls:
                self._idle.set()

    def _make_engine(self) -> VllmEngine:
        configure_environment(self._settings.model, device=self._settings.device)
        if self._settings.device == "cpu":
            keep_freed_memory()
        return VllmEngine(self._settings)

    def _prompt_ids(self, prompt: str | list[int]) -> list[int]:
        ids = self._tokenizer.encode(prompt, add_special_tokens=False) if isinstance(prompt, str) else list(prompt)
        limit = self._settings.max_model_len - 1
        if not 1 <= len(ids) <= limit:
            raise ValueError(
                f"the prompt has {len(ids)} tokens; it must have 1 to {limit}, since prompt and response together may "
                f"have {limit + 1} (training.seq_len). Shorten the prompt or raise the limit."
            )
        return ids

    def _completion(self, result: Finished) -> Completion:
        text = result.text
        if text is None:
            text = self._tokenizer.decode(result.token_ids, skip_special_tokens=True)
        oldest, newest = result.versions
        return Completion(
            text=text,
            token_ids=result.token_ids,
            logprobs=result.logprobs,
            metadata={
                "policy_version": oldest,
                "policy_version_max": newest,
                "finish_reason": result.finish_reason,
                "stop_reason": result.stop_reason,
            },
        )


async def _fetch(source: WeightSource, version: int) -> tuple[int, dict[str, Tensor]]:
    """`version`, or what was published last if that is gone; raises UnknownVersion if there is nothing newer."""
    while True:
        try:
            return version, await source.fetch(version)
        except UnknownVersion:
            newest = (await source.versions())[-1:]
            if newest in ([], [version]):
                raise
            version = newest[0]


def _check_sampling(*, n: int, temperature: float, top_p: float, max_new_tokens: int) -> None:
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}.")
    if not temperature >= 0:
        raise ValueError(f"temperature must be 0 (greedy) or more, got {temperature}.")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, got {top_p}.")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}.")


def _replica_seed(seed: int) -> int:
    """A seed of its own for each replica, from the name that its process was started under (such as "generator/1")."""
    return (seed + zlib.crc32(os.environ.get("FORGE_PROC_NAME", "").encode())) % 2**31
