"""Runner V2 in all processes of an engine, on CPUs too.

vLLM imports this module by its entry point in every process of this environment, so its head imports nothing
heavy.
"""

from __future__ import annotations

import os
from typing import Final

from nnsight_engine.core.errors import UnsupportedOptionError

RUNNER: Final = "VLLM_USE_V2_MODEL_RUNNER"
_V2: Final = "1"
_TARGET: Final = "VLLM_TARGET_DEVICE"
_CPU: Final = "cpu"
_PLATFORM: Final = "nnsight_engine.vllm_backend.cpu_platform.V2CpuPlatform"


def plugin() -> str | None:
    """Return the platform's class name on a CPU with runner V2, else None; called by vLLM."""
    if os.environ.get(RUNNER) != _V2:
        return None
    from vllm.platforms import cpu_platform_plugin  # noqa: PLC0415 - see the module

    return _PLATFORM if cpu_platform_plugin() else None


def use_runner_v2() -> None:
    """Have engines of this process, and of those that it starts, use runner V2; raise as ``check_runner``."""
    check_runner()
    os.environ[RUNNER] = _V2
    from vllm.platforms import current_platform  # noqa: PLC0415 - see the module

    if current_platform.is_cpu():
        from nnsight_engine.vllm_backend.cpu_platform import V2CpuPlatform  # noqa: PLC0415 - imports vLLM

        if not isinstance(current_platform, V2CpuPlatform):
            current_platform.__class__ = V2CpuPlatform  # vLLM's modules share the instance


def check_runner() -> None:
    """Raise UnsupportedOptionError if the environment chooses runner V1, or keeps the plugin out."""
    chosen = os.environ.get(RUNNER, _V2)
    if chosen != _V2:
        raise UnsupportedOptionError(
            f"{RUNNER}={chosen} is not supported: interventions need vLLM's model runner V2, on CPUs too; "
            "unset the variable"
        )
    if os.environ.get(_TARGET) == _CPU:
        raise UnsupportedOptionError(
            f"{_TARGET}={_CPU} is not supported: vLLM then loads no plugin with the kernels for CPUs; unset "
            "the variable, which vLLM's build for CPUs does not need"
        )
