"""Tracing compared with PyTorch hooks, on one thread, on small layers and on a language model.

*ours* is a trace, *hooks* registers PyTorch hooks, runs and removes them, *bare* is the model alone; sides
take turns, call by call. The small model is twelve linear layers without gradients, the language model
SmolLM2-135M-Instruct. The patching methods are those of the NNsight paper's Table 1.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Final

import torch

import nnsight_engine
from benchmarks.case import BenchmarkCase, Measure, Plan, Sampler, difference, ratio, total
from benchmarks.patching import activation_patching, attribution_patching
from benchmarks.peers.hooks import hook_works
from benchmarks.peers.tasks import (
    NUM_SMALL_LAYERS,
    NUM_TOKENS,
    Subject,
    generation_options,
    language_subject,
    small_subject,
)
from benchmarks.peers.traces import trace_works, wrapped_language_model
from benchmarks.turns import CallsByTurns, Side
from nnsight_engine import NNsight
from nnsight_engine.modeling.bundled import bundled_model_path

Sides = dict[str, Callable[[], Any]]

_WIDTH: Final = 512
_WIDTHS: Final = (64, 256, 512, 1024, 2048)
_BATCHES: Final = (8, 32, 128)
"""At width 512; 1 is among the widths already."""
_LANGUAGE_TARGET: Final = 1.03
_LANGUAGE_REPEATS: Final = 15


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the option that chooses a model."""
    parser.add_argument("--only", choices=["small", "language"], help="one of the two models")


def plan(args: argparse.Namespace, _stack: contextlib.ExitStack) -> Plan:
    """Return the cases."""
    torch.set_num_threads(1)
    cases: list[BenchmarkCase] = []
    if args.only != "language":
        cases += small_cases((64, 512), (32,)) if args.quick else small_cases()
    if args.only != "small":
        cases += _language_cases(1 if args.quick else _LANGUAGE_REPEATS)
    return Plan(cases, "" if args.only is None else f"-{args.only}")


def _checked(sides: Sides) -> Sides:
    """Return the sides, of which ours and hooks must compute the same."""
    ours, hooks = sides["ours"](), sides["hooks"]()
    if not all(torch.equal(first, second) for first, second in zip(ours, hooks, strict=True)):
        raise AssertionError("the trace and the hooks must compute the same, and do not")
    return sides


def small_cases(widths: Sequence[int] = _WIDTHS, batches: Sequence[int] = _BATCHES) -> list[BenchmarkCase]:
    """Return every case on the small model."""
    sizes = [(width, 1) for width in widths] + [(_WIDTH, batch) for batch in batches]
    over_bare, over_hooks = difference("ours", "bare"), ratio("ours", "hooks")
    one_value = (difference("ours", "bare", target=60), over_hooks, ratio("ours", "bare"))
    all_values = (ratio("ours", "hooks", 1.5), over_bare)
    untraced = (ratio("ours", "bare", 1.02), ratio("control", "bare"))
    invokes = (
        _each_further("ours", "ours alone", "each further invoke that saves, µs", 10),
        _each_further("idle", "ours alone", "each further invoke that does nothing, µs"),
        _each_further("hooks", "hook alone", "each further hook, µs"),
        over_hooks,
    )

    def case(
        name: str, size: tuple[int, int], sides: Callable[[Subject], Sides], measures: tuple[Measure, ...]
    ) -> BenchmarkCase:
        def make() -> Sampler:
            return CallsByTurns(sides(small_subject(*size)))

        return BenchmarkCase(name, f"width {size[0]}, batch {size[1]}", make, measures)

    def task(name: str, size: tuple[int, int], key: str, measures: tuple[Measure, ...]) -> BenchmarkCase:
        return case(name, size, partial(_task_sides, key), measures)

    return [
        *(task("one saved value", size, "one_value", one_value) for size in sizes),
        *(task("twelve saved values", size, "all_values", all_values) for size in sizes),
        *(task("one value replaced", size, "one_write", (over_bare, over_hooks)) for size in sizes[:2]),
        *(case("traced before, now untraced", (_WIDTH, batch), _untraced, untraced) for batch in (1, 32)),
        *(case("twelve invokes", (width, 1), _invokes, invokes) for width in widths[:2]),
    ]


def _each_further(many: str, alone: str, name: str, target: float | None = None) -> Measure:
    return total(name, {many: 1, alone: -1}, 1e6 / (NUM_SMALL_LAYERS - 1), target)


def _task_sides(key: str, subject: Subject) -> Sides:
    """Return the sides of a task of the comparison with peers, on a model of any size."""
    ours = trace_works(nnsight_engine, NNsight(subject.module), subject)[key]
    return _checked({"ours": ours, "hooks": hook_works(subject)[key], "bare": _bare(subject)})


def _bare(subject: Subject) -> Side:
    def bare() -> None:
        with torch.no_grad():
            subject.module(subject.inputs)

    return bare


def _untraced(subject: Subject) -> Sides:
    """Return sides on the very same weights, so that their position in memory makes no difference."""
    twins = {"ours": subject, "bare": subject.twin(), "control": subject.twin()}
    trace_works(nnsight_engine, NNsight(subject.module), subject)["one_value"]()
    return {name: _bare(one) for name, one in twins.items()}


def _invokes(subject: Subject) -> Sides:
    """Return one invoke with the input and eleven without, one invoke alone, and as many hooks."""
    model, inputs, hooks = NNsight(subject.module), subject.inputs, hook_works(subject)

    def idle() -> None:
        with torch.no_grad(), model.trace() as tracer:
            with tracer.invoke(inputs):
                model[0].output.save()
            for _ in range(1, NUM_SMALL_LAYERS):
                with tracer.invoke():
                    pass

    def alone() -> None:
        with torch.no_grad(), model.trace() as tracer, tracer.invoke(inputs):
            model[0].output.save()

    ours = trace_works(nnsight_engine, NNsight(subject.module), subject)["shared_invokes"]
    return _checked(
        {
            "ours": ours,
            "idle": idle,
            "ours alone": alone,
            "hooks": hooks["shared_invokes"],
            "hook alone": hooks["one_value"],
        }
    )


def _language_cases(repeats: int) -> list[BenchmarkCase]:
    """Return every case on the language model, which is loaded once, by the first."""
    path = bundled_model_path()

    @cache
    def loaded() -> tuple[Subject, Any]:
        subject = language_subject(path)
        return subject, wrapped_language_model(nnsight_engine, subject, path)

    def generation() -> Sides:
        subject, model = loaded()
        twin, ids = subject.twin(), subject.inputs
        options = {"attention_mask": torch.ones_like(ids), **generation_options()}
        return {
            "ours": trace_works(nnsight_engine, model, subject)["generation"],
            "hooks": hook_works(subject.twin())["generation"],
            "bare": lambda: twin.module.generate(ids, **options),
        }

    def activation(which: slice) -> Sides:
        subject, model = loaded()
        return dict(activation_patching(model, subject.module, which))

    def attribution() -> Sides:
        subject, model = loaded()
        return dict(attribution_patching(model, subject.module))

    def case(name: str, sides: Callable[[], Sides], *measures: Measure) -> BenchmarkCase:
        return BenchmarkCase(
            name, "SmolLM2", lambda: CallsByTurns(_checked(sides())), measures, "ms", repeats
        )

    over_hooks, over_bare = ratio("ours", "hooks", _LANGUAGE_TARGET), ratio("ours", "bare", _LANGUAGE_TARGET)
    saved = f"one layer's output saved at each of {NUM_TOKENS} tokens"
    one_layer, all_layers = slice(15, 16), slice(None)
    return [
        case(saved, generation, over_bare, ratio("ours", "hooks")),
        case("activation patching, one MLP layer", partial(activation, one_layer), over_hooks),
        case("activation patching, all MLP layers", partial(activation, all_layers), over_hooks),
        case("attribution patching, all MLP layers", attribution, over_hooks),
    ]
