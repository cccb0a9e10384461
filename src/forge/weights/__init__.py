"""Versions of the policy: published by the trainer, fetched by the generators, kept by a process of their own.

    store = await WeightStore.start()                      # in the controller; given to actors as an init argument
    await store.publish(3, model.state_dict().items())     # in the trainer
    tensors = await store.fetch(3)                         # in a generator: {"embed.weight": tensor, ...}

`store.py` what callers use · `packing.py` named tensors ↔ flat chunks, and how they are verified · `segments.py` memory
that processes share · `torchstore_client.py` TorchStore, where the chunks are · `mirror.py` a host's one copy of them
where the store is elsewhere.
"""

from forge.weights.packing import CorruptWeights, UnknownVersion, WeightStoreError
from forge.weights.store import Transport, WeightStore

__all__ = ["CorruptWeights", "Transport", "UnknownVersion", "WeightStore", "WeightStoreError"]
