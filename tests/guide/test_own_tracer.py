"""A tracer of one's own captures, compiles and executes a block in its own way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from nnsight_engine.intervention.tracing.base import Tracer
from nnsight_engine.intervention.tracing.tracer import InterleavingTracer

from nnsight_engine import NNsight


class Recorder(Tracer):
    """Runs nothing: keeps the compiled function, to be called when wanted."""

    function: Callable[[], Any]

    def execute(self, function: Callable[[], Any]) -> None:
        self.function = function


class Logger(Tracer):
    """Wraps the compiled function, with something before it and after."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log

    def compile(self) -> Callable[[], Any]:
        function = super().compile()

        def logged() -> Any:
            self.log.append("setup")
            result = function()
            self.log.append("teardown")
            return result

        return logged


class WithoutGradients(InterleavingTracer):
    """A forward pass that keeps no graph."""

    def execute(self, function: Callable[[], Any]) -> Any:
        with torch.no_grad():
            return super().execute(function)


class Differential(InterleavingTracer):
    """Runs the model once by itself and once with the block, and keeps the difference of their results."""

    difference: torch.Tensor

    def execute(self, function: Callable[[], Any]) -> Any:
        alone = self.function(*self.args, **self.kwargs)
        result = super().execute(function)
        self.difference = result - alone
        return result


def test_execute_decides_when_the_block_runs() -> None:
    runs: list[str] = []
    with Recorder() as tracer:
        runs.append("ran")
    assert runs == []
    tracer.function()
    tracer.function()
    assert runs == ["ran", "ran"]


def test_compile_can_wrap_the_block() -> None:
    log: list[str] = []
    with Logger(log):
        log.append("block")
    assert log == ["setup", "block", "teardown"]


def test_a_model_is_traced_by_a_custom_tracer(tiny: NNsight, features: torch.Tensor) -> None:
    with tiny.trace(features):
        kept = tiny.output.save()
    with WithoutGradients(tiny._module, tiny, features):
        without = tiny.output.save()
    with tiny.trace(features, tracer_cls=WithoutGradients):
        again = tiny.output.save()
    assert kept.requires_grad
    assert not without.requires_grad
    assert not again.requires_grad
    assert torch.equal(kept, without)
    assert torch.equal(kept, again)


def test_a_differential_tracer_compares_with_and_without_the_block(
    tiny: NNsight, features: torch.Tensor
) -> None:
    with Differential(tiny._module, tiny, features) as tracer:
        tiny.layer1.output[:] = 0
    layers = tiny._module
    layer2 = layers.get_submodule("layer2")
    assert torch.equal(tracer.difference, layer2(torch.zeros(1, 10)) - layers(features))


def test_a_custom_tracer_takes_invokes(tiny: NNsight, features: torch.Tensor) -> None:
    with WithoutGradients(tiny._module, tiny) as tracer:
        with tracer.invoke(features):
            hidden = tiny.layer1.output.save()
        with tracer.invoke():
            output = tiny.output.save()
    assert torch.equal(hidden, tiny._module.get_submodule("layer1")(features))
    assert torch.equal(output, tiny._module(features))
    assert not output.requires_grad
