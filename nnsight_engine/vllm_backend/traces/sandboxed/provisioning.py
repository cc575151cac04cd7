"""Setup of a worker's sandbox processes: a description of its model, and the fork server that loads it."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from nnsight_engine.sandbox.forkserver import ForkServer
from nnsight_engine.serialization import encode

if TYPE_CHECKING:
    from nnsight_engine.vllm_backend.compat import EngineLimits
    from nnsight_engine.vllm_backend.model_points import ModelPoints
    from nnsight_engine.vllm_backend.traces.remote_modules import Description
    from nnsight_engine.vllm_backend.traces.sandboxed.module_policy import CallableModules
    from nnsight_engine.vllm_backend.traces.sandboxed.sandbox_pool import SandboxPool

_ZYGOTE: Final = "nnsight_engine.vllm_backend.traces.sandboxed.zygote"
_NUM_SPARE: Final = 4


def open_sandbox_pool(
    sandboxes: SandboxPool,
    served: CallableModules,
    modules: Sequence[Description],
    points: ModelPoints,
    limits: EngineLimits,
) -> None:
    """Start the fork server for a worker's sandboxed traces, without waiting for it."""
    half_bytes = limits.sandbox_message_bytes
    setup = {
        "call_bytes": served.call_bytes,
        "modules": list(modules),
        "layout": points.layout.to_plain(),
        "sizes": {
            "hidden_size": points.hidden_size,
            "vocab_size": points.vocab_size,
            "tensor_parallel_size": points.tensor_parallel_size,
        },
        "limits": dataclasses.asdict(limits),
        "entry": served.entry,
        "refused": sorted(served.refused),
    }
    command = [sys.executable, "-m", _ZYGOTE]
    server = ForkServer(
        command, encode(setup), half_bytes, _NUM_SPARE, needs_namespaces=limits.sandbox_needs_namespaces
    )
    server.start()
    sandboxes.open(server, served, half_bytes)


__all__ = ["open_sandbox_pool"]
