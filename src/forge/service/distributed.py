"""torch.distributed between the ranks of one actor, on the addresses that the provisioner chose."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore


def init_process_group(backend: str, *, timeout_s: float = 600.0) -> None:
    """`torch.distributed.init_process_group` with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT of this process.

    PyTorch's own rendezvous listens on all interfaces, whatever MASTER_ADDR says; this one listens on MASTER_ADDR
    alone, which is loopback unless the ranks are on several hosts. (gloo's and NCCL's sockets follow GLOO_SOCKET_IFNAME
    and NCCL_SOCKET_IFNAME, which the provisioner sets.) A group that exists already is kept, and a process that is
    alone opens no port.

    Args:
        backend: "gloo" or "nccl".
        timeout_s: seconds until ranks that do not turn up, or a collective that does not end, are an error.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        return
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    timeout = timedelta(seconds=timeout_s)
    if world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        store = _store(address, int(os.environ["MASTER_PORT"]), rank, world_size, timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def _store(address: str, port: int, rank: int, world_size: int, timeout: timedelta) -> TCPStore:
    """Rank 0 serves the rendezvous on a socket that was bound to `address` first."""
    import torch.distributed as dist

    if rank > 0:
        return dist.TCPStore(address, port, world_size, is_master=False, timeout=timeout)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the host holds the port until we listen
    listener.bind((address, port))
    listener.listen()
    return dist.TCPStore(
        address,
        port,
        world_size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # the store closes it
    )
