"""vLLM's CPU platform with a name for what a Ray worker takes; see ``ray_plugin``."""

from __future__ import annotations

from vllm.platforms.cpu import CpuPlatform

from nnsight_engine.vllm_backend.ray_plugin import DEVICE


class RayCpuPlatform(CpuPlatform):
    """CPUs, which Ray hands out one by one."""

    ray_device_key = DEVICE
