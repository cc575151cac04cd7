"""vLLM's CPU platform for engines of any kind, as a plugin that each process of an engine loads.

The plugin is found on the path that ``engine_kinds`` gives to processes; without the environment from there
it does nothing. Runner V2 gets the kernels for CPUs.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, ClassVar, Final

from typing_extensions import override
from vllm.platforms.cpu import CpuPlatform

from nnsight_engine.vllm_backend.cpu_kernels.install import allow_v2, install

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KIND: Final = "ENGINE_KIND"
"""The variable that names the kind of a process's engines, such as ``v2-async-small_draft``."""


def is_v2() -> bool:
    """Return whether engines of this process have runner V2, which vLLM reads once."""
    return os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"


class KindPlatform(CpuPlatform):
    """CPUs on which the configuration says whether scheduling is asynchronous, and V2 has kernels."""

    _is_registered: ClassVar[bool] = False

    @classmethod
    @override
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        scheduler = vllm_config.scheduler_config
        is_async = scheduler.async_scheduling
        super().check_and_update_config(vllm_config)
        scheduler.async_scheduling = is_async
        if is_v2():
            allow_v2()

    @classmethod
    @override
    def register_triton_kernel_overrides(cls) -> None:
        """Register once a process: vLLM then looks through all modules, and fails at numba's.

        Numba is imported with the first engine that drafts n-grams.
        """
        if not cls._is_registered:
            super().register_triton_kernel_overrides()
            if is_v2():
                install()
            cls._is_registered = True


def plugin() -> str | None:
    """Return the platform's class name in processes that are to use it, else None; called by vLLM."""
    return f"{KindPlatform.__module__}.{KindPlatform.__qualname__}" if KIND in os.environ else None
