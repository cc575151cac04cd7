"""Environment variables of this process and of the processes that it starts: engines, traces and replicas.

Beside ``settings`` this is the only module that reads or sets any.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from app.settings import Settings, otlp_traces_endpoint

MEDIA_CONNECTOR: Final = "nnsight_engine"
"""The name of ``app.engine.media`` in vLLM's registry."""

_ENGINE_DEFAULTS: Final = {
    # vLLM reserves one core for itself on CPU; on small machines that is half of them.
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    # GiB of KV cache on CPU: without it vLLM takes nearly all memory.
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # One process for the engine and its only worker instead of two: saves seconds at start.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    # vLLM's own fetches any URL of a request; a redirect would lead from an allowed host to any other.
    "VLLM_MEDIA_CONNECTOR": MEDIA_CONNECTOR,
    "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0",
    # An image of a few bytes can have this many pixels, of 3 bytes each once it is decoded.
    "VLLM_MAX_IMAGE_PIXELS": str(2**24),
    "RAY_USAGE_STATS_ENABLED": "0",
    # Warnings of libraries about each other, which nobody who starts a server can act upon.
    "PYTHONWARNINGS": "ignore:`torch.distributed.reduce_op`:FutureWarning",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


def set_engine_defaults() -> None:
    """Set vLLM's environment variables unless the operator has; must run before vLLM is imported."""
    for name, value in _ENGINE_DEFAULTS.items():
        os.environ.setdefault(name, value)


def set_engine_log(path: str) -> None:
    """Set the logging configuration file (standard library format) of vLLM's processes, before its import."""
    os.environ.setdefault("VLLM_LOGGING_CONFIG_PATH", path)


def set_engine_log_level(level: str) -> None:
    os.environ["VLLM_LOGGING_LEVEL"] = level
    logging.getLogger("vllm").setLevel(level)


def engine_trace_options(settings: Settings) -> list[str]:
    """Return vLLM's arguments for the same collector, and set the environment variables that vLLM reads."""
    endpoint = otlp_traces_endpoint(settings)
    if not endpoint:
        return []
    os.environ.setdefault("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", settings.otlp_protocol)
    os.environ.setdefault("OTEL_SERVICE_NAME", "nnsight-engine")
    return ["--otlp-traces-endpoint", endpoint]


def vllm_key() -> str:
    """Return the key that the operator has set for vLLM's own server; empty if none."""
    return os.environ.get("VLLM_API_KEY", "")


ADAPTER_UPDATES: Final = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"


def may_update_adapters() -> bool:
    return _is_on(ADAPTER_UPDATES)


def may_exceed_max_model_len() -> bool:
    return _is_on("VLLM_ALLOW_LONG_MAX_MODEL_LEN")


def uses_other_hub() -> bool:
    """Return whether vLLM loads models from ModelScope."""
    return _is_on("VLLM_USE_MODELSCOPE")


def _is_on(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() in {"1", "true"}  # as vLLM reads it


_SOCKETS: Final = "VLLM_RPC_BASE_PATH"


def is_socket_folder_set() -> bool:
    return _SOCKETS in os.environ


def set_socket_folder(folder: Path | None) -> None:
    """Set the folder of the next engine's sockets, which vLLM never removes; None for vLLM's default."""
    if folder is None:
        os.environ.pop(_SOCKETS, None)
    else:
        os.environ[_SOCKETS] = str(folder)


def spawn_engines() -> None:
    """Make vLLM spawn its next engine: a forked one would keep the connections to clients open."""
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"


_PASSED_ON: Final = frozenset(
    {
        "HOME",
        "LANG",
        "LD_LIBRARY_PATH",
        "PATH",
        "PYTHONHOME",
        "PYTHONPATH",
        "TMPDIR",
        "TZ",
        "USER",
        "VIRTUAL_ENV",
    }
)
_PASSED_ON_FAMILIES: Final = (
    "CUDA_", "HF_HOME", "HF_HUB_CACHE", "HIP_", "HSA_", "HUGGINGFACE_HUB_CACHE", "KMP_", "LC_", "MKL_",
    "NVIDIA_", "OMP_", "OPENBLAS_", "PYTORCH_", "ROCM_", "ROCR_", "TORCH_", "TRANSFORMERS_CACHE",
    "XDG_CACHE_HOME",
)  # fmt: skip


def environment_for_traces() -> dict[str, str]:
    """Return the variables that users' code needs, without secrets; the model's files are present by then."""
    passed_on = {
        name: value
        for name, value in os.environ.items()
        if name in _PASSED_ON or name.startswith(_PASSED_ON_FAMILIES)
    }
    return {
        **passed_on,
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


_OURS: Final = Settings.model_config["env_prefix"]
_PASSED_TO_REPLICAS: Final = ("HF_", "NVIDIA_", "OMP_", "OTEL_", "VLLM_", "XDG_", _OURS)


def environment_for_replicas() -> dict[str, str]:
    """Return the environment variables to pass on to replicas, which may run on other machines."""
    return {name: value for name, value in os.environ.items() if name.startswith(_PASSED_TO_REPLICAS)}


def environment_of_replica(base: Mapping[str, str], name: str, *, cores: str) -> dict[str, str]:
    """Return the environment of one replica's server: this process's, updated with ``base``.

    ``cores`` of a CPU engine are in vLLM's notation, empty to leave them to vLLM.
    """
    environment = {**os.environ, **base, f"{_OURS}REPLICA": name}
    # These apply to the front, not to a replica: its address, and the folder for the metrics of several
    # processes.
    for variable in (f"{_OURS}HOST", f"{_OURS}PORT", "PROMETHEUS_MULTIPROC_DIR"):
        environment.pop(variable, None)
    if cores:
        environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", cores)
    return environment


def cluster_address() -> str | None:
    """Return the address of the Ray cluster that the operator chose; None to start one."""
    return os.environ.get("RAY_ADDRESS") or None
