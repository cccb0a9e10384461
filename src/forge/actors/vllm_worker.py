"""What the generator adds to vLLM's workers: taking new weights, seeding. vLLM mixes it into its worker class."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor


class WorkerExtension:
    """Mixed into a worker, which may be in this process or in one of vLLM's own; called through `collective_rpc`."""

    model_runner: Any
    distributed_init_method: str

    def forge_patch(self) -> None:
        """Applies our patches of vLLM in the worker's process (CPU only)."""
        from forge.actors import _patches_vllm

        _patches_vllm.apply()

    def forge_rendezvous(self) -> str:
        """Where the workers met: the URL of a file."""
        return self.distributed_init_method

    def forge_load_weights(self, weights: dict[str, Tensor] | str) -> None:
        """Replaces the model's weights in place.

        Args:
            weights: under Hugging Face names; or the path of a safetensors file that this worker maps into memory,
                so that nothing but the path goes through a message.
        """
        named = _read(weights) if isinstance(weights, str) else iter(weights.items())
        self.model_runner.reload_weights(weights_iterator=named)

    def forge_seed(self, seed: int) -> None:
        """Seeds the random numbers that sampling takes."""
        from vllm.utils.torch_utils import set_random_seed

        set_random_seed(seed)


def _read(path: str) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - the file object cannot be iterated
            yield name, file.get_tensor(name)
