"""What TorchTitan 0.3.0 needs before it runs on a CPU. Applied by `load_model`, never by an import.

`torchtitan.tools.utils` decides the process's device type while it is imported, and takes "cuda" where it finds no
accelerator; device meshes, FSDP2 and tensor parallelism follow it. There is no setting for it up to 0.3.0; drop this
file when there is one.
"""

from __future__ import annotations

import sys


def use_device(device: str) -> None:
    """Make TorchTitan use `device` ("cpu" or "cuda") in this process. Call it before any other torchtitan import.

    Raises:
        RuntimeError: torchtitan was imported before, and for another device.
    """
    if "torchtitan.tools.utils" not in sys.modules:
        _import_as(device)
    from torchtitan.tools.utils import device_type

    if device_type != device:
        raise RuntimeError(
            f"this process already uses TorchTitan on {device_type!r} and cannot switch to {device!r}: "
            f"run the two in different processes, or call use_device before importing torchtitan."
        )


def _import_as(device: str) -> None:
    import torch._utils

    # Replaced only while torchtitan looks: torch itself asks the same function elsewhere.
    original = torch._utils._get_available_device_type
    torch._utils._get_available_device_type = lambda: device
    try:
        import torchtitan.tools.utils  # noqa: F401 - read for its effect
    finally:
        torch._utils._get_available_device_type = original
