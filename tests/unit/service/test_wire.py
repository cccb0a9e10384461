import asyncio

import pytest
import torch

from forge.service import RemoteError, RemoteTraceback
from forge.service.wire import decode, decode_call, decode_reply, encode, encode_call, encode_error, encode_reply


class NeedsTwo(ValueError):
    """Pickles like any exception, but cannot be built again from what was pickled."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def raised(error):
    try:
        raise error
    except BaseException as caught:
        return caught


def caught_from(data):
    with pytest.raises(Exception) as info:
        decode_reply(data)
    return info.value


def test_a_call_keeps_method_arguments_and_who_answers():
    call = decode_call(encode_call("add", (1, [2]), {"k": "v"}, every_rank_answers=True))
    assert (call.method, call.args, call.kwargs, call.every_rank_answers) == ("add", (1, [2]), {"k": "v"}, True)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float16, torch.complex64]
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (2, 0, 3)])
def test_tensors_arrive_bit_for_bit(dtype, shape):
    tensor = torch.arange(max(1, torch.Size(shape).numel()))[: torch.Size(shape).numel()].reshape(shape).to(dtype)
    arrived = decode(encode({"x": [tensor]}))["x"][0]
    assert arrived.dtype == dtype
    assert arrived.shape == tensor.shape
    assert torch.equal(arrived, tensor)


def test_nan_and_negative_zero_survive():
    tensor = torch.tensor([float("nan"), -0.0, float("inf")])
    assert torch.equal(decode(encode(tensor)).view(torch.int32), tensor.view(torch.int32))


def test_a_transposed_slice_sends_its_own_elements_only():
    tensor = torch.arange(1_000_000.0).reshape(1000, 1000).t()[:2, :2]
    data = encode(tensor)
    assert decode(data).tolist() == [[0.0, 1000.0], [1.0, 1001.0]]
    assert len(data) < 1000


def test_an_arrived_tensor_can_be_written_to():
    arrived = decode(encode(torch.zeros(3)))
    arrived += 1
    assert arrived.tolist() == [1, 1, 1]


def test_a_parameter_with_a_gradient_arrives_as_its_values():
    assert decode(encode(torch.ones(2, requires_grad=True) * 3)).tolist() == [3, 3]


def test_functions_of_the_caller_travel_too():
    k = 5
    assert decode(encode(lambda x: x + k))(2) == 7


def test_a_reply_carries_rank_and_value():
    assert decode_reply(encode_reply(1, {"a": 2})) == (1, {"a": 2})


def test_an_exception_keeps_its_type_and_brings_its_traceback():
    error = caught_from(encode_error(0, raised(KeyError("missing"))))
    assert type(error) is KeyError
    assert error.args == ("missing",)
    assert isinstance(error.__cause__, RemoteTraceback)
    assert "in raised" in str(error.__cause__)


def test_an_exception_that_cannot_be_rebuilt_arrives_as_remote_error_with_its_message():
    error = caught_from(encode_error(0, raised(NeedsTwo(1, 2))))
    assert type(error) is RemoteError
    assert "NeedsTwo: 1 and 2" in str(error)
    assert "in raised" in str(error.__cause__)


@pytest.mark.parametrize("stops_the_caller", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()])
def test_what_would_stop_the_caller_arrives_as_remote_error(stops_the_caller):
    error = caught_from(encode_error(0, raised(stops_the_caller)))
    assert type(error) is RemoteError
    assert type(stops_the_caller).__name__ in str(error)
