"""Groups → (inputs, targets), one dict per data-parallel rank (contract section 4)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forge.types import Episode, Group

TensorDict = dict[str, Tensor]


def split_groups(groups: Sequence[Group], *, ranks: int) -> list[list[Group]]:
    """Deals whole groups to `ranks` ranks so that their token counts are as even as a greedy deal makes them.

    Groups stay whole because their episodes share a prompt, which a rank computes once. Longest first, each to the
    rank with the least so far; the order within a rank is that of the groups. A rank may stay empty.

    Example:
        four groups of 9, 5, 4 and 1 tokens on two ranks → tokens [10, 9]
    """
    sizes = [sum(len(e.prompt_ids) + len(e.response_ids) for e in g.episodes) for g in groups]
    load = [0] * ranks
    chosen: list[list[int]] = [[] for _ in range(ranks)]
    for i in sorted(range(len(groups)), key=lambda i: (-sizes[i], i)):
        rank = min(range(ranks), key=lambda r: (load[r], r))
        load[rank] += sizes[i]
        chosen[rank].append(i)
    return [[groups[i] for i in sorted(indices)] for indices in chosen]


def collate(
    episodes: Sequence[Episode], *, pad_id: int, with_reference: bool | None = None
) -> tuple[TensorDict, TensorDict]:
    """Episodes → one rank's padded dicts: prompts padded on the left to P, responses on the right to R.

    Args:
        episodes: B of them; B may be 0 (a rank without work), then P = R = 1.
        pad_id: any valid token id; padding is told apart by the masks alone, never by this id.
        with_reference: whether there are `ref_logprobs`; None: if every episode has them. All ranks of a batch must
            agree, the one without episodes too.

    Returns:
        inputs: `tokens` [B, P+R] int64, `attention_mask` [B, P+R] bool (True on real tokens).
        targets: `response` [B, R] int64, `padding_mask` [B, R] bool, `advantages` [B, 1], `generator_logprobs` [B, R]
            and, where every episode has them, `ref_logprobs` [B, R], all float32.

    Example:
        prompts [[5], [6, 7]] and responses [[1, 2], [3]] with pad 0 → tokens [[0, 5, 1, 2], [6, 7, 3, 0]]
    """
    rows = len(episodes)
    width_p = max((len(e.prompt_ids) for e in episodes), default=1)
    width_r = max((len(e.response_ids) for e in episodes), default=1)
    tokens = torch.full((rows, width_p + width_r), pad_id, dtype=torch.int64)
    attention = torch.zeros((rows, width_p + width_r), dtype=torch.bool)
    mask = torch.zeros((rows, width_r), dtype=torch.bool)
    generator = torch.zeros((rows, width_r), dtype=torch.float32)
    reference = torch.zeros((rows, width_r), dtype=torch.float32)
    if with_reference is None:
        with_reference = have_reference(episodes)
    for i, e in enumerate(episodes):
        start, stop = width_p - len(e.prompt_ids), width_p + len(e.response_ids)
        tokens[i, start:stop] = torch.tensor(e.prompt_ids + e.response_ids, dtype=torch.int64)
        attention[i, start:stop] = True
        mask[i, : len(e.response_ids)] = torch.tensor(e.response_mask, dtype=torch.bool)
        generator[i, : len(e.response_ids)] = torch.tensor(e.generator_logprobs, dtype=torch.float32)
        if with_reference and e.ref_logprobs is not None:
            reference[i, : len(e.response_ids)] = torch.tensor(e.ref_logprobs, dtype=torch.float32)
    inputs = {"tokens": tokens, "attention_mask": attention}
    targets = {
        "response": tokens[:, width_p:].clone(),
        "padding_mask": mask,
        "advantages": torch.tensor([[e.advantage] for e in episodes], dtype=torch.float32).reshape(rows, 1),
        "generator_logprobs": generator,
    }
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
