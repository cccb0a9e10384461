"""The parts of a fine-tuning run: what is read before anything starts, the batches, and the actors."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.actors.trainer import Trainer
from forge.app import Run
from forge.batching import TensorDict, make_document_batch
from forge.config import SFTConfig
from forge.data.chat import ChatFormat
from forge.data.documents import Document, DocumentStream, build_documents
from forge.losses import SFTLoss
from forge.parts import (
    Services,
    check_place,
    check_supported,
    device,
    ending,
    generator_arguments,
    generator_options,
    health_metrics,
    options,
    provisioned,
    read_model,
)
from forge.service import ActorHandle, Service
from forge.types import UserError
from forge.weights import WeightStore

Batch = tuple[list[TensorDict], list[TensorDict]]
"""What `Trainer.train_step` takes: inputs and targets, one dict for each data-parallel rank."""

HELDOUT_BATCH = 128
"""Held-out documents in one call of `Trainer.evaluate`: a few MB in a message, and rows that are full."""


@dataclass(kw_only=True, slots=True)
class Parts:
    """Everything that the loop uses."""

    documents: DocumentStream
    """Documents to train on, without end."""
    heldout: list[Document]
    prompts: list[Prompt]
    trainer: ActorHandle
    generator: Service | None
    data_parallel_ranks: int

    def health(self) -> dict[str, float]:
        """How the services are: healthy replicas, restarts, requests sent again."""
        return health_metrics({"trainer": self.trainer, "generator": self.generator})


@dataclass(kw_only=True, slots=True)
class Prompt:
    """One of `eval.prompts`, ready for the generator."""

    text: str
    """As the user wrote it."""
    rendered: str
    """With the chat template around it."""
    ids: list[int]


@dataclass(kw_only=True, slots=True)
class Inputs:
    """What a run reads before anything starts."""

    model: Path
    documents: DocumentStream
    heldout: list[Document]
    prompts: list[Prompt]


def read_inputs(config: SFTConfig, scratch: Path) -> Inputs:
    """Reads model config and data, and checks the placement, so that what is wrong is told first.

    Args:
        scratch: where the tiny model of `model: toy` is made.

    Raises:
        UserError: with what to mend.
    """
    check_place(config.launcher, services_of(config))
    return read_files(config, scratch)


def read_files(config: SFTConfig, scratch: Path) -> Inputs:
    """`read_inputs`, wherever the run will be."""
    check_supported(services_of(config))
    folder, tokenizer = read_model(config, scratch, generator=config.generator)
    documents, heldout = build_documents(
        config.dataset,
        eval=config.eval,
        tokenizer=tokenizer,
        seq_len=config.training.seq_len,
        seed=config.training.seed,
    )
    chat = ChatFormat(tokenizer, system_prompt=config.dataset.system_prompt, chat_template=config.dataset.chat_template)
    prompts = [Prompt(text=text, rendered=r, ids=ids) for text in config.eval.prompts for r, ids in [chat.render(text)]]
    room = config.training.seq_len - config.eval.max_new_tokens
    for number, prompt in enumerate(prompts):
        if len(prompt.ids) > room:
            raise UserError(
                f"eval.prompts.{number} has {len(prompt.ids)} tokens, but training.seq_len {config.training.seq_len} - "
                f"eval.max_new_tokens {config.eval.max_new_tokens} leaves {room}.\n    Fix: a shorter prompt, or a "
                "smaller eval.max_new_tokens"
            )
    return Inputs(model=folder, documents=documents, heldout=heldout, prompts=prompts)


@asynccontextmanager
async def start_parts(run: Run[SFTConfig]) -> AsyncIterator[Parts]:
    """Reads the inputs and starts every actor; when left, ends them all."""
    run.console.phase("reading model and data")
    inputs = await run.unless_stopped(asyncio.to_thread(read_inputs, run.config, run.folder))
    async with provisioned(run, services_of(run.config)) as provisioner:
        parts = await start_actors(run, inputs)
        async with ending([parts.trainer, parts.generator], provisioner):
            yield parts


async def start_actors(run: Run[SFTConfig], inputs: Inputs) -> Parts:
    """Starts the services at the same time; returns when all are ready."""
    config, services, model = run.config, run.config.services, str(inputs.model)
    run.console.phase("starting the trainer" + (" and the generator" if config.generator else ""))
    store = await WeightStore.start() if config.generator else None
    arguments = generator_arguments(config, config.generator, services.trainer) if config.generator else {}
    starting: list[Any] = [
        options(Trainer, services.trainer, "trainer").as_actor(
            model=model,
            training=config.training,
            parallelism=config.parallelism,
            lora=config.lora,
            loss=SFTLoss(),
            device=device(services.trainer),
            weights=store,
            weights_dtype=arguments.get("dtype", "float32"),
        )
    ]
    if config.generator:
        starting.append(generator_options(config.generator).as_service(model=model, weights=store, **arguments))
    trainer, *generator = await run.unless_stopped(asyncio.gather(*starting))
    return Parts(
        documents=inputs.documents,
        heldout=inputs.heldout,
        prompts=inputs.prompts,
        trainer=trainer,
        generator=generator[0] if generator else None,
        data_parallel_ranks=await trainer.data_parallel_ranks.call(),
    )


@dataclass(kw_only=True, slots=True)
class Delivery:
    """The batch of one optimizer step, and where the stream stands behind it."""

    batch: Batch
    position: dict[str, Any]
    """What a run needs that goes on after this batch (`DocumentStream.state_dict`)."""
    epoch: float
    dropped: Counter[str]
    """Rows passed over so far, by reason."""
    truncated: int
    """Documents cut to seq_len so far."""


class Batches:
    """One optimizer step's batch after the other; the next is read while the trainer has the last.

    Args:
        stream: the documents.
        documents: how many a step takes.
        ranks: data-parallel ranks.
    """

    def __init__(self, stream: DocumentStream, *, documents: int, ranks: int) -> None:
        self._stream = stream
        self._documents = documents
        self._ranks = ranks
        self._next: asyncio.Task[Delivery] | None = None

    async def take(self) -> Delivery:
        """The next batch; waits for the disk or the hub if it was not read in time."""
        current = self._next or self._begin()
        delivery = await asyncio.shield(current)
        self._next = self._begin()
        return delivery

    async def close(self) -> None:
        """Waits for what is being read."""
        if self._next is not None:
            await asyncio.gather(self._next, return_exceptions=True)

    def _begin(self) -> asyncio.Task[Delivery]:
        self._next = asyncio.create_task(asyncio.to_thread(self._read))
        return self._next

    def _read(self) -> Delivery:
        documents = list(itertools.islice(self._stream, self._documents))
        return Delivery(
            batch=make_document_batch(documents, ranks=self._ranks, pad_id=0),
            position=self._stream.state_dict(),
            epoch=self._stream.epoch,
            dropped=self._stream.dropped.copy(),
            truncated=self._stream.truncated,
        )


def heldout_batches(heldout: Sequence[Document], *, ranks: int) -> list[Batch]:
    """The held-out documents, in the pieces that `Trainer.evaluate` is given."""
    pieces = [heldout[start : start + HELDOUT_BATCH] for start in range(0, len(heldout), HELDOUT_BATCH)]
    return [make_document_batch(piece, ranks=ranks, pad_id=0) for piece in pieces]


def services_of(config: SFTConfig) -> Services:
    """The services that the config starts, by name."""
    return {"trainer": config.services.trainer, "generator": config.generator}
