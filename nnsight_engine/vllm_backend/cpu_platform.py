"""vLLM's CPU platform with runner V2's kernels, asynchronous scheduling, and what Ray needs."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.platforms.cpu import CpuPlatform

from nnsight_engine.vllm_backend.cpu_kernels.install import allow_v2, install

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@contextlib.contextmanager
def _foreign_objects() -> Iterator[None]:
    """Have vLLM look for its kernels in all modules, also where an object's ``__dict__`` is none: numba's."""

    from vllm.triton_utils import dispatcher  # noqa: PLC0415 - it imports the platform

    def attributes(value: Any) -> Mapping[str, Any]:
        attributes_of: Any = vars(value)
        return attributes_of if isinstance(attributes_of, Mapping) else {}

    dispatcher.vars = attributes  # in place of the builtin
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of objects that are looked at
            yield
    finally:
        del dispatcher.vars


class V2CpuPlatform(CpuPlatform):
    ray_device_key = "GPU"
    """Ray's name of the device that each worker takes; vLLM's own platform has none."""

    _is_registered: ClassVar[bool] = False

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        scheduler = vllm_config.scheduler_config
        is_async = scheduler.async_scheduling
        super().check_and_update_config(vllm_config)
        scheduler.async_scheduling = is_async
        allow_v2()

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        if not cls._is_registered:
            with _foreign_objects():
                super().register_triton_kernel_overrides()
                install()
            cls._is_registered = True
