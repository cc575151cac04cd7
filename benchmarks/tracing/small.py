"""A stack of linear layers, so small that what a trace costs shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from benchmarks.tracing.timing import (
    CallsByTurns,
    Case,
    Measure,
    Sample,
    Sampler,
    Side,
    microseconds_over,
    ratio,
)
from nnsight_engine import NNsight, save

_NUM_LAYERS: Final = 12
_LAYER: Final = 5
_BATCH: Final = 1
_WIDTH: Final = 512

WIDTHS: Final = (64, 256, 512, 1024, 2048)
BATCHES: Final = (8, 32, 128)
"""At width 512; 1 is among the widths already."""


def small_cases(widths: Sequence[int] = WIDTHS, batches: Sequence[int] = BATCHES) -> list[Case]:
    """Return every case on this model."""
    sizes = [(width, _BATCH) for width in widths] + [(_WIDTH, batch) for batch in batches]
    return [
        *(_one_value(*size) for size in sizes),
        *(_twelve_values(*size) for size in sizes),
        *(_one_swap(*size) for size in sizes[:2]),
        *(_untraced(_WIDTH, batch) for batch in (1, 32)),
        *(_twelve_invokes(width) for width in widths[:2]),
    ]


def _network(width: int) -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(width, width) for _ in range(_NUM_LAYERS)]
    return torch.nn.Sequential(*layers).requires_grad_(requires_grad=False)


def _size(width: int, batch: int) -> str:
    return f"width {width}, batch {batch}"


def _check(ours: object, hooks: object) -> None:
    """Refuse to time sides that differ in what they compute."""
    pairs = zip(_tensors(ours), _tensors(hooks), strict=True)
    if not all(torch.equal(first, second) for first, second in pairs):
        raise AssertionError("the trace and the hooks must compute the same, and do not")


def _tensors(value: object) -> list[torch.Tensor]:
    values = value if isinstance(value, list) else [value]
    return [one for one in values if isinstance(one, torch.Tensor)]


def _one_value(width: int, batch: int) -> Case:
    def make() -> Sampler:
        module = _network(width)
        model, row = NNsight(module), torch.randn(batch, width)

        def bare() -> torch.Tensor:
            output: torch.Tensor = module(row)
            return output

        def hooks() -> torch.Tensor:
            kept: list[torch.Tensor] = []
            handle = module[_LAYER].register_forward_hook(lambda _module, _args, output: kept.append(output))
            try:
                module(row)
            finally:
                handle.remove()
            return kept[0]

        def ours() -> torch.Tensor:
            with model.trace(row):
                hidden: torch.Tensor = model[_LAYER].output.save()
            return hidden

        _check(ours(), hooks())
        return CallsByTurns({"ours": ours, "hooks": hooks, "bare": bare})

    measures = (microseconds_over("ours", "bare", 60), ratio("ours", "hooks"), ratio("ours", "bare"))
    return Case("one saved value", _size(width, batch), make, measures)


def _twelve_values(width: int, batch: int) -> Case:
    def make() -> Sampler:
        module = _network(width)
        model, row = NNsight(module), torch.randn(batch, width)

        def hooks() -> list[torch.Tensor]:
            kept: list[torch.Tensor] = []
            handles = [
                layer.register_forward_hook(lambda _module, _args, output: kept.append(output))
                for layer in module
            ]
            try:
                module(row)
            finally:
                for handle in handles:
                    handle.remove()
            return kept

        def ours() -> list[torch.Tensor]:
            with model.trace(row):
                kept = save([])
                for layer in model:
                    kept.append(layer.output)
            return kept

        _check(ours(), hooks())
        return CallsByTurns({"ours": ours, "hooks": hooks, "bare": lambda: module(row)})

    measures = (ratio("ours", "hooks", 1.5), microseconds_over("ours", "bare"))
    return Case("twelve saved values", _size(width, batch), make, measures)


def _one_swap(width: int, batch: int) -> Case:
    def make() -> Sampler:
        module = _network(width)
        model, row, value = NNsight(module), torch.randn(batch, width), torch.randn(batch, width)

        def hooks() -> torch.Tensor:
            handle = module[_LAYER].register_forward_hook(lambda _module, _args, _output: value)
            try:
                output: torch.Tensor = module(row)
            finally:
                handle.remove()
            return output

        def ours() -> torch.Tensor:
            with model.trace(row):
                model[_LAYER].output = value
                output: torch.Tensor = model.output.save()
            return output

        _check(ours(), hooks())
        return CallsByTurns({"ours": ours, "hooks": hooks, "bare": lambda: module(row)})

    measures = (microseconds_over("ours", "bare"), ratio("ours", "hooks"))
    return Case("one value replaced, output saved", _size(width, batch), make, measures)


def _untraced(width: int, batch: int) -> Case:
    def make() -> Sampler:
        module, row = _network(width), torch.randn(batch, width)
        plain, control = _twin(module), _twin(module)
        model = NNsight(module)
        with model.trace(row):
            model.output.save()
        sides: dict[str, Side] = {
            "ours": lambda: module(row),
            "bare": lambda: plain(row),
            "control": lambda: control(row),
        }
        return CallsByTurns(sides, 0.1)

    measures = (ratio("ours", "bare", 1.02), ratio("control", "bare"))
    return Case("wrapped and traced before, now untraced", _size(width, batch), make, measures)


def _twin(module: torch.nn.Sequential) -> torch.nn.Sequential:
    """Return another module on the very same weights, so that where they lie in memory tells nothing."""
    twin = _network(1)
    for layer, original in zip(twin, module, strict=True):
        layer.weight, layer.bias = original.weight, original.bias
    return twin


def _twelve_invokes(width: int) -> Case:
    """One invoke with the input and eleven empty ones, beside one invoke alone; and as many hooks."""

    def make() -> Sampler:
        module = _network(width)
        model, row = NNsight(module), torch.randn(_BATCH, width)

        def hooks(number: int) -> list[torch.Tensor]:
            kept: list[torch.Tensor] = []
            handles = [
                layer.register_forward_hook(lambda _module, _args, output: kept.append(output))
                for layer in list(module)[:number]
            ]
            try:
                module(row)
            finally:
                for handle in handles:
                    handle.remove()
            return kept

        def ours() -> list[torch.Tensor]:
            with model.trace() as tracer:
                kept = save([])
                with tracer.invoke(row):
                    kept.append(model[0].output)
                for layer in range(1, _NUM_LAYERS):
                    with tracer.invoke():
                        kept.append(model[layer].output)
            return kept

        def ours_idle() -> None:
            with model.trace() as tracer:
                with tracer.invoke(row):
                    model[0].output.save()
                for _ in range(1, _NUM_LAYERS):
                    with tracer.invoke():
                        pass

        def ours_alone() -> list[torch.Tensor]:
            with model.trace() as tracer:
                kept = save([])
                with tracer.invoke(row):
                    kept.append(model[0].output)
            return kept

        _check(ours(), hooks(_NUM_LAYERS))
        sides: dict[str, Side] = {
            "ours": ours,
            "ours idle": ours_idle,
            "ours alone": ours_alone,
            "hooks": lambda: hooks(_NUM_LAYERS),
            "hooks alone": lambda: hooks(1),
            "bare": lambda: module(row),
        }
        return CallsByTurns(sides)

    measures = (
        _each_further("ours", "ours alone", "each further invoke that saves, µs", 10),
        _each_further("ours idle", "ours alone", "each further invoke that does nothing, µs"),
        _each_further("hooks", "hooks alone", "each further hook, µs"),
        ratio("ours", "hooks"),
    )
    return Case("twelve invokes", _size(width, _BATCH), make, measures)


def _each_further(many: str, alone: str, name: str, target: float | None = None) -> Measure:
    def of(sample: Sample) -> float:
        return 1e6 * (sample[many] - sample[alone]) / (_NUM_LAYERS - 1)

    return Measure(name, of, target)
