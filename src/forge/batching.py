"""Groups, or documents → (inputs, targets), one dict per data-parallel rank (contract section 4)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forge.data.documents import Document
from forge.types import Episode, Group

TensorDict = dict[str, Tensor]


def deal(sizes: Sequence[int], *, ranks: int) -> list[list[int]]:
    """Deals items to `ranks` ranks so that their sizes sum up as evenly as a greedy deal makes them.

    Largest first, each to the rank with the least so far; the order within a rank is that of the items. A rank may
    stay empty.

    Returns:
        per rank, the indices of its items.

    Example:
        >>> deal([9, 5, 4, 1], ranks=2)
        [[0, 3], [1, 2]]
    """
    load = [0] * ranks
    chosen: list[list[int]] = [[] for _ in range(ranks)]
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        rank = min(range(ranks), key=lambda r: (load[r], r))
        load[rank] += sizes[i]
        chosen[rank].append(i)
    return [sorted(indices) for indices in chosen]


def split_groups(groups: Sequence[Group], *, ranks: int) -> list[list[Group]]:
    """Deals whole groups to `ranks` ranks by their tokens.

    Groups stay whole because their episodes share a prompt, which a rank computes once.
    """
    sizes = [sum(len(e.prompt_ids) + len(e.response_ids) for e in g.episodes) for g in groups]
    return [[groups[i] for i in indices] for indices in deal(sizes, ranks=ranks)]


def pad(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    masks: Sequence[Sequence[bool]],
    *,
    pad_id: int,
) -> tuple[TensorDict, TensorDict]:
    """Token ids → padded tensors: prompts padded on the left to P, responses on the right to R.

    Args:
        prompts: B of them; B may be 0 (a rank without work), then P = R = 1.
        responses: as many.
        masks: of each response token, whether it is trained.
        pad_id: any valid token id; padding is told apart by the masks alone, never by this id.

    Returns:
        inputs: `tokens` [B, P+R] int64, `attention_mask` [B, P+R] bool (True on real tokens).
        targets: `response` [B, R] int64, `padding_mask` [B, R] bool.
    """
    rows = len(prompts)
    width_p = max(map(len, prompts), default=1)
    width_r = max(map(len, responses), default=1)
    tokens = torch.full((rows, width_p + width_r), pad_id, dtype=torch.int64)
    attention = torch.zeros((rows, width_p + width_r), dtype=torch.bool)
    trained = torch.zeros((rows, width_r), dtype=torch.bool)
    for i, (prompt, response, mask) in enumerate(zip(prompts, responses, masks, strict=True)):
        start, stop = width_p - len(prompt), width_p + len(response)
        tokens[i, start:stop] = torch.tensor([*prompt, *response], dtype=torch.int64)
        attention[i, start:stop] = True
        trained[i, : len(response)] = torch.tensor(mask, dtype=torch.bool)
    inputs = {"tokens": tokens, "attention_mask": attention}
    return inputs, {"response": tokens[:, width_p:].clone(), "padding_mask": trained}


def collate(
    episodes: Sequence[Episode], *, pad_id: int, with_reference: bool | None = None
) -> tuple[TensorDict, TensorDict]:
    """Episodes → one rank's padded dicts.

    Args:
        episodes: B of them; B may be 0.
        pad_id: as in `pad`.
        with_reference: whether there are `ref_logprobs`; None: if every episode has them. All ranks of a batch must
            agree, the one without episodes too.

    Returns:
        inputs and targets as of `pad`, and in targets `advantages` [B, 1], `generator_logprobs` [B, R] and, where every
        episode has them, `ref_logprobs` [B, R], all float32.

    Example:
        prompts [[5], [6, 7]] and responses [[1, 2], [3]] with pad 0 → tokens [[0, 5, 1, 2], [6, 7, 3, 0]]
    """
    inputs, targets = pad(
        [e.prompt_ids for e in episodes],
        [e.response_ids for e in episodes],
        [e.response_mask for e in episodes],
        pad_id=pad_id,
    )
    generator = torch.zeros(targets["response"].shape, dtype=torch.float32)
    reference = torch.zeros_like(generator)
    if with_reference is None:
        with_reference = have_reference(episodes)
    for i, e in enumerate(episodes):
        generator[i, : len(e.response_ids)] = torch.tensor(e.generator_logprobs, dtype=torch.float32)
        if with_reference and e.ref_logprobs is not None:
            reference[i, : len(e.response_ids)] = torch.tensor(e.ref_logprobs, dtype=torch.float32)
    advantages = [[e.advantage] for e in episodes]
    targets["advantages"] = torch.tensor(advantages, dtype=torch.float32).reshape(len(episodes), 1)
    targets["generator_logprobs"] = generator
    if with_reference:
        targets["ref_logprobs"] = reference
    return inputs, targets


def have_reference(episodes: Sequence[Episode]) -> bool:
    """Whether there are reference log-probabilities for all of them."""
    return bool(episodes) and all(e.ref_logprobs is not None for e in episodes)


def make_batch(groups: Sequence[Group], *, ranks: int, pad_id: int) -> tuple[list[TensorDict], list[TensorDict]]:
    """One optimizer step's groups → the lists that `Trainer.train_step` takes, one dict per data-parallel rank."""
    with_reference = have_reference([e for g in groups for e in g.episodes])
    shards = [
        collate([e for g in shard for e in g.episodes], pad_id=pad_id, with_reference=with_reference)
        for shard in split_groups(groups, ranks=ranks)
    ]
    return [inputs for inputs, _ in shards], [targets for _, targets in shards]


def make_document_batch(
    documents: Sequence[Document], *, ranks: int, pad_id: int
) -> tuple[list[TensorDict], list[TensorDict]]:
    """One optimizer step's documents → the lists that `Trainer.train_step` takes, one dict per data-parallel rank.

    A document's first token is its prompt (P = 1), since nothing predicts it; all others are response, trained where
    `Document.trained` says so. Documents are dealt out by their tokens; a rank may stay empty.

    Example:
        tokens [7, 8, 9], of which 9 is trained → tokens [[7, 8, 9]], response [[8, 9]], padding_mask [[False, True]]
    """
    batches = []
    for indices in deal([len(document.token_ids) for document in documents], ranks=ranks):
        mine = [documents[i] for i in indices]
        inputs, targets = pad(
            [document.token_ids[:1] for document in mine],
            [document.token_ids[1:] for document in mine],
            [document.trained[1:] for document in mine],
            pad_id=pad_id,
        )
        targets["advantages"] = torch.ones(len(mine), 1)
        batches.append((inputs, targets))
    return [inputs for inputs, _ in batches], [targets for _, targets in batches]
