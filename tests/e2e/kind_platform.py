"""vLLM's CPU platform for engines of any kind, as a plugin that each process of an engine loads.

vLLM calls its plugins before it looks for Triton. This one is found on the path that ``engine_kinds`` gives
to processes; with the environment from there it prepares V2, and without it does nothing.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, ClassVar, Final

from typing_extensions import override
from vllm.platforms.cpu import CpuPlatform

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KIND: Final = "ENGINE_KIND"
"""The variable that names the kind of a process's engines, such as ``v2-async-small_draft``."""


class KindPlatform(CpuPlatform):
    """CPUs on which the configuration says whether scheduling is asynchronous."""

    _is_registered: ClassVar[bool] = False

    @classmethod
    @override
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        scheduler = vllm_config.scheduler_config
        is_async = scheduler.async_scheduling
        super().check_and_update_config(vllm_config)
        scheduler.async_scheduling = is_async
        # Triton's interpreter does not run the kernel of top-k and top-p.
        from vllm.v1.sample.ops import topk_topp_sampler  # noqa: PLC0415 - asks for the platform

        topk_topp_sampler.HAS_TRITON = False

    @classmethod
    @override
    def register_triton_kernel_overrides(cls) -> None:
        """Register once a process: vLLM then looks through all modules, and fails at numba's.

        Numba is imported with the first engine that drafts n-grams.
        """
        if not cls._is_registered:
            super().register_triton_kernel_overrides()
            cls._is_registered = True


def plugin() -> str | None:
    """Return the platform's class name in processes that are to use it, else None; called by vLLM."""
    kind = os.environ.get(KIND)
    if kind is None:
        return None
    if kind.startswith("v2"):
        from tests.e2e.triton_on_cpu import install  # noqa: PLC0415 - imports Triton, which V1 goes without

        install()
    return f"{KindPlatform.__module__}.{KindPlatform.__qualname__}"
