"""How a call becomes bytes and back.

Monarch pickles a tensor by `torch.save`, which costs 22 ms for 16 KB and seconds for 16 MB; the bytes of its memory
cost 1 ms and 40 ms. So calls are pickled here, and Monarch only carries bytes.

    request  = encode_call("double", (21,), {})
    reply    = encode_reply(42)            or  encode_error(exception)
    decode_reply(reply)                    returns the value, or raises what was raised
"""

from __future__ import annotations

import io
import pickle
import sys
import traceback
from dataclasses import dataclass
from typing import Any

import cloudpickle

from forge.service.errors import RemoteError, RemoteTraceback


def _rebuild_tensor(data: bytearray, dtype: str, shape: tuple[int, ...]) -> Any:
    import torch

    if not data:  # frombuffer refuses an empty buffer
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return torch.frombuffer(data, dtype=getattr(torch, dtype)).reshape(shape)


def _reduce_tensor(tensor: Any) -> tuple[Any, tuple[Any, ...]]:
    import torch

    flat = tensor.detach().to("cpu").reshape(-1)
    data = pickle.PickleBuffer(flat.view(torch.uint8).numpy()) if flat.numel() else bytearray()
    return _rebuild_tensor, (data, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


class _Pickler(cloudpickle.Pickler):
    """cloudpickle (functions and classes of the user's script travel too), with tensors as their plain memory."""

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and type(obj) is torch.Tensor and obj.layout is torch.strided and not obj.is_quantized:
            return _reduce_tensor(obj)
        return super().reducer_override(obj)


def encode(value: Any) -> bytes:
    """Pickles `value`. A tensor is sent by value and arrives on the CPU, without its gradient."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(value)
    return buffer.getvalue()


def decode(data: bytes) -> Any:
    """The inverse of `encode`. The bytes must come from a process of the same run: pickle executes what it reads."""
    return pickle.loads(data)


@dataclass(kw_only=True, slots=True)
class Call:
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    every_rank_answers: bool
    """False: only rank 0 sends its result back, the others just that they are done."""


def encode_call(method: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, every_rank_answers: bool) -> bytes:
    return encode((method, args, kwargs, every_rank_answers))


def decode_call(data: bytes) -> Call:
    method, args, kwargs, every_rank_answers = decode(data)
    return Call(method=method, args=args, kwargs=kwargs, every_rank_answers=every_rank_answers)


def encode_reply(rank: int, value: Any) -> bytes:
    return encode((rank, True, value))


def encode_error(rank: int, error: BaseException) -> bytes:
    """An exception with its traceback, or a `RemoteError` in its place where it cannot or must not be re-raised."""
    text = "".join(traceback.format_exception(error))
    try:
        if not isinstance(error, Exception):
            raise TypeError(f"{type(error).__name__} would stop the caller")
        payload = encode(error)
    except Exception:
        payload = encode(RemoteError(f"{type(error).__module__}.{type(error).__qualname__}: {error}"))
    return encode((rank, False, (payload, f"{type(error).__qualname__}: {error}", text)))


def decode_reply(data: bytes) -> tuple[int, Any]:
    """`(rank, value)`. Raises what the other side raised, with `RemoteTraceback` as its cause."""
    rank, ok, value = decode(data)
    if ok:
        return rank, value
    payload, summary, text = value
    try:
        error = decode(payload)
    except Exception:  # its class is not importable here, or cannot be built from what was pickled
        error = RemoteError(summary)
    raise error from RemoteTraceback(text)
