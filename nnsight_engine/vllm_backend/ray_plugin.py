"""vLLM on CPUs under Ray: a platform plugin that lends a worker the one thing that vLLM's CPU platform lacks.

vLLM asks Ray for one device per worker, and its CPU platform has no name for one. Where our executor asks for
it, by a variable in the environment of its own Ray workers, the platform is one with "GPU"s, of which a
cluster may have any number. Every process that uses vLLM in the same environment loads this module by its
entry point: it imports nothing, and answers that it is not there.
"""

from __future__ import annotations

import os
from typing import Final

ASKED_FOR: Final = "NNSIGHT_ENGINE_RAY_ON_CPU"
"""Set to 1 in the processes that are to have the platform."""

DEVICE: Final = "GPU"
"""What a worker is to take of a node, by Ray's name."""

_PLATFORM: Final = "nnsight_engine.vllm_backend.ray_platform.RayCpuPlatform"


def plugin() -> str | None:
    """Return the platform's class, where it is asked for; called by vLLM."""
    return _PLATFORM if os.environ.get(ASKED_FOR) == "1" else None
