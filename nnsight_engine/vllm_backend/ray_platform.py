"""vLLM's CPU platform with a Ray device name for workers; see ``ray_plugin``."""

from __future__ import annotations

from vllm.platforms.cpu import CpuPlatform

from nnsight_engine.vllm_backend.ray_plugin import DEVICE


class RayCpuPlatform(CpuPlatform):
    """CPUs as devices that Ray assigns one by one."""

    ray_device_key = DEVICE
