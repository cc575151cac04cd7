"""What every measured engine is started with, able to intervene or not. Imports nothing of the project's."""

from __future__ import annotations

from typing import Any, Final

from vllm.platforms import current_platform

from benchmarks.precision import DTYPE_NAME

_STEP_TOKENS: Final = 2048
_GPU_SHARE: Final = {"gpu_memory_utilization": 0.25, "kv_cache_memory_bytes": 1 << 30}
"""Three engines share one GPU; on a CPU the environment says how much cache each has."""


def engine_arguments(*, eager: bool, max_num_seqs: int, max_step_tokens: int = 0) -> dict[str, Any]:
    """Return vLLM's engine arguments; ``max_step_tokens`` is the most prompt tokens of one step."""
    return {
        "dtype": DTYPE_NAME,
        "enforce_eager": eager,
        "max_model_len": 1024,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max(_STEP_TOKENS, max_step_tokens),
        "disable_log_stats": True,
        **(_GPU_SHARE if current_platform.is_cuda() else {}),
    }
