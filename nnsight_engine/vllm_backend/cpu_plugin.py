"""vLLM as the engine needs it: one version, and runner V2 in all processes, on CPUs too.

vLLM imports this module by its entry point in every process of this environment, so its head imports nothing
heavy.
"""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from typing import Final

from nnsight_engine.core.errors import UnsupportedOptionError

VLLM_VERSION: Final = "0.32.0"
"""The only version that is used: methods of vLLM's are overridden, and may change in any version."""

RUNNER: Final = "VLLM_USE_V2_MODEL_RUNNER"
_V2: Final = "1"
_TARGET: Final = "VLLM_TARGET_DEVICE"
_CPU: Final = "cpu"
_PLATFORM: Final = "nnsight_engine.vllm_backend.cpu_kernels.install.V2CpuPlatform"
_VERSION: Final = re.compile(r"^__version__ = .*?['\"]([^'\"+]*)", re.MULTILINE)


def plugin() -> str | None:
    """Return the platform's class name on a CPU with runner V2, else None; called by vLLM."""
    if os.environ.get(RUNNER) != _V2:
        return None
    from vllm.platforms import cpu_platform_plugin  # noqa: PLC0415 - see the module

    return _PLATFORM if cpu_platform_plugin() else None


def use_runner_v2() -> None:
    """Have engines of this process, and of those that it starts, use runner V2; raise as ``check_vllm``."""
    check_vllm()
    os.environ[RUNNER] = _V2
    from vllm.platforms import current_platform  # noqa: PLC0415 - see the module

    if current_platform.is_cpu():
        from nnsight_engine.vllm_backend.cpu_kernels.install import V2CpuPlatform  # noqa: PLC0415 - imports vLLM

        if not isinstance(current_platform, V2CpuPlatform):
            current_platform.__class__ = V2CpuPlatform  # vLLM's modules share the instance


def check_vllm() -> None:
    """Raise UnsupportedOptionError for another version, or an environment without runner V2 or the plugin."""
    version = _installed_version()
    if version is not None and version != VLLM_VERSION:
        raise UnsupportedOptionError(
            f"vLLM {version or 'of unknown version'} is installed, and this engine works with {VLLM_VERSION} "
            "only: pip install 'nnsight-engine[cpu]', or [gpu] on a machine with GPUs"
        )
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


def _installed_version() -> str | None:
    """Return the version without its local part, or None without vLLM; vLLM itself takes long to import."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).with_name("_version.py")
    version = _VERSION.search(file.read_text(encoding="utf-8")) if file.is_file() else None
    return "" if version is None else version[1]
