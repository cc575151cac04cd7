"""The zygote process of a worker: it has loaded vLLM's classes and the model's outline, but no weights."""

from __future__ import annotations

import dataclasses
import socket
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from nnsight_engine.sandbox.block_checker import load_modules
from nnsight_engine.sandbox.channel import read_exactly
from nnsight_engine.sandbox.confine import ProcessLimits
from nnsight_engine.sandbox.zygote import NUMBER, fork_children
from nnsight_engine.serialization import decode
from nnsight_engine.vllm_backend.compat import EngineLimits
from nnsight_engine.vllm_backend.model_layout import ModelLayout
from nnsight_engine.vllm_backend.model_points import ModelPoints
from nnsight_engine.vllm_backend.traces.errors import SandboxedError
from nnsight_engine.vllm_backend.traces.model import WorkerModel
from nnsight_engine.vllm_backend.traces.names import Names
from nnsight_engine.vllm_backend.traces.remote_modules import RemoteModuleEnvoy, tree
from nnsight_engine.vllm_backend.traces.sandboxed.sandbox_main import SandboxTraces
from nnsight_engine.vllm_backend.traces.sandboxed.warmup import Warmup


class SandboxEnvoy(RemoteModuleEnvoy):
    @property
    def source(self) -> Any:
        """Raise: operations inside a forward run in the worker, and their values are not a request's rows."""
        raise SandboxedError.source(str(self.path))


def main(orders: socket.socket, folder: str) -> None:
    (num_bytes,) = NUMBER.unpack(read_exactly(orders.recv, NUMBER.size))
    setup = decode(read_exactly(orders.recv, num_bytes))
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    limits = EngineLimits(**setup["limits"])
    limits = dataclasses.replace(limits, trace_step_s=limits.sandbox_step_s)
    points = _points(setup)
    traces = SandboxTraces(points, limits, partial(_new_model, points))
    traces.dispatcher.entry = setup["entry"]
    traces.dispatcher.refused = frozenset(setup["refused"])
    traces.max_call_bytes = min(limits.sandbox_message_bytes, setup["call_bytes"])
    warmup = Warmup.of(points)
    share = ProcessLimits(limits.sandbox_bytes - 2 * limits.sandbox_message_bytes, limits.sandbox_cpu_s)
    _warm_up()
    fork_children(orders, folder, share, partial(traces.prepare_child, limits.sandbox_blocks, warmup.run))


class _Outside:
    """Forwards calls to the traces, which are created after the model."""

    traces: SandboxTraces

    def call(self, stage: int, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.traces.call(stage, path, args, kwargs)

    def missing_attribute(self, stage: int, path: str, name: str) -> Exception:
        return self.traces.missing_attribute(stage, path, name)


_OUTSIDE = _Outside()


def _points(setup: Mapping[str, Any]) -> ModelPoints:
    model = tree([tuple(entry) for entry in setup["modules"]], 0, _OUTSIDE, {})
    layout = ModelLayout.from_plain(setup["layout"])
    family = layout.family
    layers = tuple(model.get_submodule(family.layers).children()) if family.layers else ()
    has_norm = family.final_norm in dict(model.named_modules(remove_duplicate=False))
    return ModelPoints(
        model=model,
        layout=layout,
        layers=layers,
        local_layers=range(len(layers)),
        final_norm=model.get_submodule(family.final_norm) if has_norm else None,
        project_out=None,
        **setup["sizes"],
    )


def _new_model(points: ModelPoints, traces: SandboxTraces, names: Names) -> WorkerModel:
    _OUTSIDE.traces = traces
    return WorkerModel(points, None, traces.dispatcher, names=names, calls=SandboxEnvoy)


def _warm_up() -> None:
    """Trigger lazy loading now: confined processes cannot open files."""
    load_modules()
    value = torch.ones(4, 4, dtype=torch.bfloat16)
    torch.einsum("ij,jk->ik", value, value).float().softmax(-1).topk(2).values.tolist()
    repr(torch.linalg.svd(value.float()))


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
