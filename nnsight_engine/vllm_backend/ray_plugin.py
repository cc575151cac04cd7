"""Platform plugin for vLLM on CPUs under Ray: adds the Ray device name that vLLM's CPU platform lacks.

vLLM requests one Ray device per worker, but its CPU platform has no device name. In Ray workers that this
project's executor starts, marked by an environment variable, the plugin provides a platform with devices
named "GPU", of which a cluster may have any number. Every process that uses vLLM in the same Python
environment loads this module by its entry point: there it imports nothing, and reports that the platform is
not available.
"""

from __future__ import annotations

import os
from typing import Final

ENABLED_BY: Final = "NNSIGHT_ENGINE_RAY_ON_CPU"
"""Set to 1 in processes that are to use the platform."""

DEVICE: Final = "GPU"
"""Ray's name of the device that each worker takes."""

_PLATFORM: Final = "nnsight_engine.vllm_backend.ray_platform.RayCpuPlatform"


def plugin() -> str | None:
    """Return the platform's class name if it is requested, else None; called by vLLM."""
    return _PLATFORM if os.environ.get(ENABLED_BY) == "1" else None
