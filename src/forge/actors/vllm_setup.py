"""What has to be settled before vLLM is imported and before its engine is built: environment, data type, KV memory."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from forge import precision

logger = logging.getLogger(__name__)

GIB = 2**30
_KV_FLOOR = 1 * GIB
"""The KV cache may take this much of any machine."""
_KV_SHARE = 16
"""... or one part in so many of the memory that is available, where that is more."""


def configure_environment(model: str, *, device: str) -> None:
    """Sets the environment variables that vLLM and the hub clients read, in this process and those it starts.

    To be called in a process of the generator's own, before the first import of vLLM. What the user has set stays,
    except that the engine is always run in this process.

    Args:
        model: with a local folder the hub clients are put offline.
        device: "cpu" or "cuda".
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine steps on a thread of this process
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_HOST_IP": "127.0.0.1",  # its workers are on this host, so nothing needs to listen elsewhere
        "VLLM_LOGGING_LEVEL": _log_level(),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONWARNINGS": "ignore::FutureWarning",  # its workers' imports are full of them
    }
    if device == "cpu":
        defaults |= {
            # vLLM would pin every generator to the same first cores, the trainer's too.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "GLOO_SOCKET_IFNAME": "lo",
        }
    if Path(model).is_dir():
        defaults |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    if os.environ["VLLM_LOGGING_LEVEL"] == "ERROR":
        # Warns at import, before vLLM reads its level, that the Triton which came with torch has no CPU backend.
        logging.getLogger("vllm.triton_utils.importing").setLevel(logging.ERROR)


def resolve_dtype(dtype: str, *, device: str) -> str:
    """ "auto" made concrete: bfloat16 on GPUs and on CPUs that multiply it in hardware, float32 on other CPUs.

    >>> resolve_dtype("float32", device="cpu")
    'float32'
    """
    if dtype == "bfloat16" and device == "cpu" and not precision.cpu_multiplies_bfloat16():
        logger.warning(
            "the generator's dtype is bfloat16, which this CPU only emulates: expect it to be 3 to 7 times slower than "
            "float32. Set services.generator.dtype: float32."
        )
    return precision.resolve_dtype(dtype, with_gpus=device != "cpu")


def kv_cache_bytes(vllm_config: Any) -> int:
    """Bytes of KV cache for one worker on the CPU: what `max_num_seqs` sequences of full length need, within reason.

    The limit is 1 GiB or a sixteenth of the available memory, whichever is more, and never less than one sequence of
    full length; sequences that do not fit wait. Memory is touched when it is reserved, so more than needed costs time.
    """
    import psutil

    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    block = vllm_config.cache_config.block_size
    per_token = (
        2  # key and value
        * model.get_num_layers(parallel)
        * model.get_num_kv_heads(parallel)
        * model.get_head_size()
        * model.dtype.itemsize
    )
    one = -(-model.max_model_len // block) * block * per_token
    spare = 2 * block * per_token  # vLLM keeps one block for itself
    limit = max(_KV_FLOOR, psutil.virtual_memory().available // _KV_SHARE)
    return spare + max(one, min(one * vllm_config.scheduler_config.max_num_seqs, limit))


def _log_level() -> str:
    """vLLM warns a dozen times about a healthy start on a CPU, so it is quiet unless we are asked to be talkative."""
    level = os.environ.get("FORGE_LOG_LEVEL", "").upper()
    return level if level in ("DEBUG", "INFO") else "ERROR"
