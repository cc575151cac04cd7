"""Starts the engine's process as the first step of ``nnsight-engine serve``, in parallel with all imports.

Imports nothing heavy itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from app.observability.logs import configure_engine_log
from app.settings import Settings, set_engine_defaults
from nnsight_engine.vllm_backend.early_process import begin

_ELSEWHERE: Final = ("-h", "--help", "--replicas")
"""Options with which this process itself serves nothing."""


def begin_early(options: Sequence[str]) -> None:
    """Start the engine's process where vLLM is going to spawn one, which is on CPUs.

    Invalid settings are not reported here; the command reports them later.

    Args:
        options: The arguments after ``serve``.
    """
    if any(option.partition("=")[0] in _ELSEWHERE for option in options) or _has_gpu():
        return
    try:
        settings = Settings()
    except ValidationError:
        return
    set_engine_defaults()
    configure_engine_log(settings)
    begin()


def _has_gpu() -> bool:
    devices = Path("/dev")
    return (devices / "kfd").exists() or any(devices.glob("nvidia[0-9]*"))
