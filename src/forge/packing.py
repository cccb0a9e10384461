"""Padded batches -> packed rows in which no padding and no shared prefix is computed twice.

The samples of a group share their prompt, and with worked examples in front all prompts share a preamble. A packed row
is therefore the trie of its documents: each distinct prefix stands once, and `forge.attention.TreeLayout` says who sees
whom. A causal model gives a token the same hidden state there as in a document of its own, so log-probabilities and
gradients are those of the separate documents.

Shape letters: B sequences of the padded batch, P prompt and R response columns, T unique tokens of a packed row,
M distinct scored (hidden state, target) pairs of a row, N scored positions of the batch that the row covers.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from forge.attention import TreeLayout


@dataclass(kw_only=True, slots=True)
class PackedRow:
    """One forward pass of the trainer: T unique tokens, and where their log-probabilities belong.

    The model is run on `tokens_T` and `positions_T` with `layout`; the log-probability of `score_targets_M` is read at
    the hidden states `score_index_M`; `unpack` brings these M values to the padded batch, `gather` brings gradients or
    weights of the batch back to the M pairs.
    """

    tokens_T: Tensor
    """int64 token ids."""
    positions_T: Tensor
    """int64, the place of each token in its document, from 0."""
    layout: TreeLayout
    """Which token sees which."""
    score_index_M: Tensor
    """int64 in [0, T): the hidden state that predicts. Repeats where documents part: one state, several targets."""
    score_targets_M: Tensor
    """int64: the token that is predicted."""
    score_pair_N: Tensor
    """int64 in [0, M): which of the pairs; documents that agree so far share a pair."""
    score_row_N: Tensor
    """int64 in [0, B): the sequence in the batch."""
    score_col_N: Tensor
    """int64 in [0, R): the response column (for `pack_documents`: the position in the document)."""

    @property
    def num_tokens(self) -> int:
        """T, the tokens that are computed."""
        return self.layout.num_tokens

    def to(self, device: torch.device | str) -> PackedRow:
        """The same row with its tensors on `device`."""
        names = [name for name in self.__dataclass_fields__ if name != "layout"]
        return replace(self, **{name: getattr(self, name).to(device, non_blocking=True) for name in names})


def pack(
    inputs: Mapping[str, Tensor],
    targets: Mapping[str, Tensor],
    *,
    max_tokens: int,
    share_prefixes: bool = True,
    keep_last: bool = True,
) -> list[PackedRow]:
    """Packs a padded batch: all that is scored, and nothing that no scored token sees.

    Args:
        inputs: "tokens" [B, P + R], prompts padded at the left, responses at the right; optionally "attention_mask"
            [B, P + R], nonzero where a token is real. Without it every prompt token is. Response tokens up to the last
            trained one are real in either case if they are trained.
        targets: "response" [B, R], the response part of the tokens; "padding_mask" [B, R], nonzero where a token is
            trained. Untrained tokens in the middle (an environment wrote them) are context; those behind the last
            trained one are cut. Other entries are not read.
        max_tokens: as in `pack_documents`.
        share_prefixes: as in `pack_documents`.
        keep_last: False leaves out each sequence's last trained token as an input, since its own hidden state predicts
            nothing: one token per sequence less to compute, with the same log-probabilities.

    Returns:
        Rows that together score each trained position once. Sequences without a trained token are in none.

    Raises:
        ValueError: shapes that do not fit; a trained first token with nothing in front of it; `response` that is not
            what `tokens` holds.

    Example: two samples of one prompt (7, 8) take 2 + 2 + 1 tokens instead of 8.
        >>> tokens = torch.tensor([[7, 8, 1, 2], [7, 8, 3, 0]])
        >>> mask = torch.tensor([[1, 1], [1, 0]])
        >>> [row] = pack({"tokens": tokens}, {"response": tokens[:, 2:], "padding_mask": mask}, max_tokens=100)
        >>> row.tokens_T.tolist(), row.score_index_M.tolist()
        ([7, 8, 3, 1, 2], [1, 1, 3])
    """
    tokens, response, trained = inputs["tokens"], targets["response"], targets["padding_mask"] != 0
    prompt_columns = tokens.shape[1] - response.shape[1]
    if response.shape != trained.shape or response.shape[0] != tokens.shape[0] or prompt_columns < 0:
        raise ValueError(
            f"tokens {tuple(tokens.shape)}, response {tuple(response.shape)} and padding_mask {tuple(trained.shape)} "
            "must be [B, P + R], [B, R] and [B, R]."
        )
    wrong = trained & (tokens[:, prompt_columns:] != response)
    if bool(wrong.any()):
        row, column = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"response[{row}, {column}] is {int(response[row, column])}, but tokens[{row}, {prompt_columns + column}] "
            f"is {int(tokens[row, prompt_columns + column])}: tokens must be the prompt followed by the response."
        )
    real = torch.ones_like(tokens, dtype=torch.bool)
    if inputs.get("attention_mask") is not None:
        real = inputs["attention_mask"] != 0
        if real.shape != tokens.shape:
            raise ValueError(f"attention_mask {tuple(real.shape)} must have the shape of tokens {tuple(tokens.shape)}.")
        real = torch.cat([real[:, :prompt_columns], real[:, prompt_columns:] | trained], dim=1)
    documents, scored, columns = [], [], []
    for ids, keep, marks in zip(tokens.tolist(), real.tolist(), trained.tolist(), strict=True):
        last = prompt_columns + max((column for column, mark in enumerate(marks) if mark), default=-prompt_columns - 1)
        kept = [column for column in range(last + 1) if keep[column]]
        documents.append([ids[column] for column in kept])
        scored.append(
            [i for i, column in enumerate(kept) if column >= prompt_columns and marks[column - prompt_columns]]
        )
        columns.append([kept[i] - prompt_columns for i in scored[-1]])
    rows = pack_documents(documents, scored, max_tokens=max_tokens, share_prefixes=share_prefixes, keep_last=keep_last)
    return [_to_response_columns(row, scored, columns) for row in rows]


def pack_documents(
    documents: Sequence[Sequence[int]],
    scored: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    share_prefixes: bool = True,
    keep_last: bool = True,
) -> list[PackedRow]:
    """Packs documents of any kind, each seeing only itself; the core of `pack`, and what fine-tuning uses.

    Args:
        documents: token ids.
        scored: per document, the positions whose token is scored, ascending; from 1, since the token before predicts.
        max_tokens: unique tokens per row. Documents with a common prefix share a row where they fit; a set of them that
            is larger is cut, and the prefix repeated. A document longer than this gets a row of its own.
        share_prefixes: False keeps every document whole and apart.
        keep_last: False cuts a document before its last scored token instead of behind it.

    Returns:
        Rows in the order of their first document, the same for the same arguments. `score_row_N` is the document,
        `score_col_N` the position in it. Documents without a scored position are in none.

    Raises:
        ValueError: `max_tokens` below 1, a scored position 0 or beyond its document.

    Example:
        >>> [row] = pack_documents([[5, 6, 7], [5, 6, 9]], [[2], [2]], max_tokens=8)
        >>> row.tokens_T.tolist(), row.positions_T.tolist(), row.score_index_M.tolist()
        ([5, 6, 9, 7], [0, 1, 2, 2], [1, 1])
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}.")
    ids: dict[int, list[int]] = {}
    for number, (document, positions) in enumerate(zip(documents, scored, strict=True)):
        if not positions:
            continue
        if positions[0] < 1 or positions[-1] >= len(document):
            raise ValueError(
                f"document {number} of {len(document)} tokens scores positions {positions[0]} to {positions[-1]}: they "
                f"must lie in 1 to {len(document) - 1}, since the token before predicts. Put a token (say BOS) in "
                "front, or leave the position out."
            )
        ids[number] = list(document[: positions[-1] + keep_last])
    if share_prefixes:
        bins = _bins_by_trie(ids, max_tokens)
    else:
        bins = _best_fit([_Bin(size=len(tokens), documents=[number]) for number, tokens in ids.items()], 0, max_tokens)
    bins.sort(key=lambda item: min(item.documents))
    return [_build_row(item.documents, ids, documents, scored, share_prefixes) for item in bins]


def unpack(values_M: Tensor, row: PackedRow, out_BR: Tensor) -> Tensor:
    """A copy of `out_BR` [B, R] with the row's values [M] (log-probabilities, say) at their places; differentiable.

    The dtype is that of `out_BR`. Call it once per row, starting from zeros.
    """
    values_N = values_M.index_select(0, row.score_pair_N).to(out_BR.dtype)
    return out_BR.index_put((row.score_row_N, row.score_col_N), values_N)


def gather(values_BR: Tensor, row: PackedRow) -> Tensor:
    """The transpose of `unpack`: [B, R] gradients or per-token weights -> [M], summed where positions share a pair.

    So `sum(gather(dL/dlogprobs, row) * logprobs_M)` back-propagates the row's share of any loss L of the batch.
    """
    values_N = values_BR[row.score_row_N, row.score_col_N]
    return values_N.new_zeros(row.score_index_M.shape[0]).index_add(0, row.score_pair_N, values_N)


def _to_response_columns(row: PackedRow, scored: list[list[int]], columns: list[list[int]]) -> PackedRow:
    """`score_col_N` from positions in the document to columns of the response."""
    documents = row.score_row_N.tolist()
    lookup = {number: dict(zip(scored[number], columns[number], strict=True)) for number in set(documents)}
    pairs = zip(documents, row.score_col_N.tolist(), strict=True)
    return replace(row, score_col_N=torch.tensor([lookup[number][position] for number, position in pairs]))


# ---- which documents share a row ------------------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
class _Bin:
    """A row to be: its documents, and its size in unique tokens."""

    size: int
    documents: list[int]


def _bins_by_trie(ids: Mapping[int, list[int]], max_tokens: int) -> list[_Bin]:
    """Fills rows from the leaves of the trie up, so that what shares most is put together first."""
    path: list[tuple[int, list[_Bin]]] = []  # branching nodes from the root: depth in tokens, the bins below it
    bins: list[_Bin] = []
    previous: list[int] = []
    for number in _trie_order(list(ids), ids):
        shared = _common_prefix(previous, ids[number])
        if bins:
            bins = _close_nodes(path, bins, shared, max_tokens)
            if path and path[-1][0] == shared:
                path[-1][1].extend(bins)
            else:
                path.append((shared, bins))
        bins = [_Bin(size=len(ids[number]), documents=[number])]
        previous = ids[number]
    return _close_nodes(path, bins, -1, max_tokens)


def _close_nodes(path: list[tuple[int, list[_Bin]]], bins: list[_Bin], depth: int, max_tokens: int) -> list[_Bin]:
    """Takes the nodes deeper than `depth` off the path; returns the bins of the last one."""
    while path and path[-1][0] > depth:
        shared, siblings = path.pop()
        bins = _best_fit(siblings + bins, shared, max_tokens)
    return bins


def _best_fit(bins: list[_Bin], shared: int, max_tokens: int) -> list[_Bin]:
    """Joins bins that have their first `shared` tokens in common: largest first, each into the fullest it fits."""
    joined: list[_Bin] = []
    by_size: list[tuple[int, int]] = []  # (size, index in joined), ascending
    for item in sorted(bins, key=lambda item: (-item.size, item.documents)):
        added = item.size - shared
        place = bisect.bisect_right(by_size, (max_tokens - added, len(bins))) - 1
        if by_size and added == 0:
            place = max(place, 0)  # what adds nothing fits even into a row that is too large already
        if place < 0:
            joined.append(item)
            index = len(joined) - 1
        else:
            _, index = by_size.pop(place)
            joined[index].size += added
            joined[index].documents += item.documents
        bisect.insort(by_size, (joined[index].size, index))
    return joined


def _trie_order(numbers: list[int], ids: Mapping[int, list[int]]) -> list[int]:
    """Documents with a common prefix side by side, the longer first, so that its prefixes add no segment."""
    return sorted(numbers, key=lambda number: (ids[number], -number), reverse=True)


def _common_prefix(a: list[int], b: list[int]) -> int:
    """How many tokens both begin with; by bisection, since slices compare at C speed."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


# ---- one row --------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
class _Run:
    """The tokens that one document adds to the row: depths [first, end) of it, in the row from `offset` on."""

    first: int
    end: int
    offset: int
    parent: int
    """The run that holds depth first - 1, or -1."""


def _build_row(
    numbers: list[int],
    ids: Mapping[int, list[int]],
    documents: Sequence[Sequence[int]],
    scored: Sequence[Sequence[int]],
    share_prefixes: bool,
) -> PackedRow:
    """The row of these documents: in trie order, each adds what no document before it holds."""
    tokens: list[int] = []
    runs: list[_Run] = []
    path: list[int] = []  # runs that hold the current document, from its first token on
    previous: list[int] = []
    pairs: dict[tuple[int, int], int] = {}
    score_pair: list[int] = []
    score_row: list[int] = []
    score_col: list[int] = []
    for number in _trie_order(numbers, ids) if share_prefixes else sorted(numbers):
        document = ids[number]
        shared = _common_prefix(previous, document) if share_prefixes else 0
        while path and runs[path[-1]].first >= shared:
            path.pop()
        if shared < len(document):
            parent = path[-1] if path else -1
            path.append(len(runs))
            runs.append(_Run(first=shared, end=len(document), offset=len(tokens), parent=parent))
            tokens += document[shared:]
        where = _row_indices(runs, path, len(document))
        for position in scored[number]:
            key = (where[position - 1], documents[number][position])
            score_pair.append(pairs.setdefault(key, len(pairs)))
        score_row += [number] * len(scored[number])
        score_col += scored[number]
        previous = document
    layout = TreeLayout(segments=_segments(runs))
    return PackedRow(
        tokens_T=torch.tensor(tokens),
        positions_T=layout.positions(),
        layout=layout,
        score_index_M=torch.tensor([index for index, _ in pairs]),
        score_targets_M=torch.tensor([target for _, target in pairs]),
        score_pair_N=torch.tensor(score_pair),
        score_row_N=torch.tensor(score_row),
        score_col_N=torch.tensor(score_col),
    )


def _row_indices(runs: list[_Run], path: list[int], length: int) -> list[int]:
    """Where in the row each of the current document's tokens stands."""
    where: list[int] = []
    for index, run in enumerate(runs[i] for i in path):
        end = runs[path[index + 1]].first if index + 1 < len(path) else length
        where += range(run.offset, run.offset + end - run.first)
    return where


def _segments(runs: list[_Run]) -> tuple[tuple[int, int, int], ...]:
    """The runs, cut where others branch off, as (start, end, parent) in preorder."""
    cuts: list[set[int]] = [{run.end} for run in runs]
    for run in runs:
        if run.parent >= 0:
            cuts[run.parent].add(run.first)
    segments: list[tuple[int, int, int]] = []
    ending: list[dict[int, int]] = []  # per run: depth at which a piece of it ends -> that segment's index
    for run, depths in zip(runs, cuts, strict=True):
        parent, start = ending[run.parent][run.first] if run.parent >= 0 else -1, run.offset
        ending.append({})
        for depth in sorted(depths):
            end = run.offset + depth - run.first
            segments.append((start, end, parent))
            parent = ending[-1][depth] = len(segments) - 1
            start = end
    return tuple(segments)
