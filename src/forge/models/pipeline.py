"""Pipeline parallelism: which layers a rank holds, in which order rows pass through, and what ranks send each other.

The packed rows of a step are its micro-batches. Every stage is given the same rows, so it knows tokens, positions and
layouts, and the shape of what arrives: hidden states alone travel, and their gradients.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Pass = Literal["forward", "backward"]


def stage_of_layer(layer: int, *, n_layers: int, stages: int) -> int:
    """Which stage holds a layer: as many each as possible, and the first ones one more where that is uneven.

    The last stage has the output projection besides, so it is the right one to have fewer.

    Example:
        >>> [stage_of_layer(i, n_layers=5, stages=2) for i in range(5)]
        [0, 0, 0, 1, 1]
    """
    each, more = divmod(n_layers, stages)
    return layer // (each + 1) if layer < more * (each + 1) else more + (layer - more * (each + 1)) // each


def one_forward_one_backward(
    stage: int, stages: int, rows: int
) -> Iterator[tuple[Literal["forward", "backward"], int]]:
    """What a stage does with `rows` rows, in order (1F1B, arXiv 2006.09503).

    A stage has at most `stages - stage` rows between forward and backward pass, so that the activations of its share of
    the layers take no more memory than one row takes in the whole model.

    Example:
        >>> [f"{step[0]}{row}" for step, row in one_forward_one_backward(0, 2, 3)]
        ['f0', 'f1', 'b0', 'f2', 'b1', 'b2']
    """
    ahead = min(stages - stage - 1, rows)
    for row in range(ahead):
        yield "forward", row
    for row in range(rows):
        if row + ahead < rows:
            yield "forward", row + ahead
        yield "backward", row


class Stage:
    """This rank's place in the pipeline, and its way to its neighbours.

    Args:
        mesh: the pipeline dimension of the mesh; None for a model in one piece, which sends nothing.
    """

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        self.index = 0 if mesh is None else mesh.get_local_rank()
        self.count = 1 if mesh is None else mesh.size()
        self._sending: deque[tuple[dist.Work, Tensor]] = deque()
        if mesh is not None:
            self._group = mesh.get_group()
            # One communicator for each direction: NCCL runs what is posted on one in order, and two neighbours that
            # both send first would wait for each other.
            self._backward_group = dist.new_group(
                dist.get_process_group_ranks(self._group), use_local_synchronization=True
            )

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    @property
    def holds_rank_0(self) -> bool:
        """Whether rank 0 of all processes is this pipeline's first stage."""
        return self.count == 1 or 0 in dist.get_process_group_ranks(self._group)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """What the stage before sends; None on the first."""
        if self.is_first:
            return None
        received = torch.empty(shape, dtype=dtype, device=device)
        dist.recv(received, group=self._group, group_src=self.index - 1)
        return received

    def send(self, hidden: Tensor) -> None:
        """To the next stage; the last one keeps it."""
        if not self.is_last:
            self._post(hidden, self._group, self.index + 1)

    def receive_gradient(self, hidden: Tensor) -> Tensor | None:
        """The gradient of what was sent to the next stage; None on the last, whose result is the loss."""
        if self.is_last:
            return None
        gradient = torch.empty_like(hidden)
        dist.recv(gradient, group=self._backward_group, group_src=self.index + 1)
        return gradient

    def send_gradient(self, gradient: Tensor) -> None:
        """To the stage before."""
        self._post(gradient, self._backward_group, self.index - 1)

    def finish(self) -> None:
        """Waits until everything that was sent has arrived."""
        while self._sending:
            self._sending.popleft()[0].wait()

    def from_last(self, values: Tensor) -> Tensor:
        """The last stage's `values`, which have the same shape and dtype on every stage."""
        dist.broadcast(values, group=self._group, group_src=self.count - 1)
        return values

    def to_first(self, values: Tensor) -> None:
        """Sends what the first stage gets by `from_stage`; waits until it did."""
        dist.send(values, group=self._group, group_dst=0)

    def from_stage(self, stage: int, values: Tensor) -> Tensor:
        """On the first stage: what `to_first` sent, written into `values`."""
        dist.recv(values, group=self._group, group_src=stage)
        return values

    def _post(self, values: Tensor, group: dist.ProcessGroup, to: int) -> None:
        """Sends without waiting. What was posted `count` sends ago has arrived, or will without our doing."""
        values = values.detach().contiguous()
        self._sending.append((dist.isend(values, group=group, group_dst=to), values))
        while len(self._sending) > self.count:
            self._sending.popleft()[0].wait()
