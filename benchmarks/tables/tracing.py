"""What a trace costs, beside PyTorch hooks, on one thread: on small layers, and on the language model."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import torch

import nnsight_engine
from benchmarks.case import Case, Measure, Plan, Sample, Sampler, difference, ratio
from benchmarks.patching import Patching, check_same
from benchmarks.peers.hooks import HookWork, generation_options
from benchmarks.peers.tasks import LANGUAGE, NUM_SMALL_LAYERS, NUM_TOKENS, Models, Subject, small_subject
from benchmarks.peers.traces import TraceWork, works
from benchmarks.precision import DTYPE_NAME
from benchmarks.turns import CallsByTurns, Side
from nnsight_engine import NNsight
from nnsight_engine.modeling.bundled import bundled_model_path

_WIDTH: Final = 512
_WIDTHS: Final = (64, 256, 512, 1024, 2048)
_BATCHES: Final = (8, 32, 128)
"""At width 512; 1 is among the widths already."""
_LANGUAGE_TARGET: Final = 1.03
_LANGUAGE_REPEATS: Final = 15
_METHOD: Final = f"""\
On one thread. *ours* is a trace, *hooks* registers PyTorch hooks, runs and removes them, *bare* is the model
alone; sides take turns, call by call. The small model is {NUM_SMALL_LAYERS} linear layers without gradients,
the language model SmolLM2-135M-Instruct in {DTYPE_NAME}. The patching methods are those of the NNsight
paper's Table 1."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the option that chooses a model."""
    parser.add_argument("--only", choices=["small", "language"], help="one of the two models")


def plan(args: argparse.Namespace, _stack: contextlib.ExitStack) -> Plan:
    """Return the cases."""
    torch.set_num_threads(1)
    cases: list[Case] = []
    if args.only != "language":
        cases += small_cases((64, 512), (32,)) if args.quick else small_cases()
    if args.only != "small":
        cases += _language_cases(1 if args.quick else _LANGUAGE_REPEATS)
    name = "tracing" if args.only is None else f"tracing-{args.only}"
    return Plan(name, "Tracing, beside PyTorch hooks", _METHOD, cases)


def small_cases(widths: Sequence[int] = _WIDTHS, batches: Sequence[int] = _BATCHES) -> list[Case]:
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
    return [
        *(_small("one saved value", size, "one_value", one_value) for size in sizes),
        *(_small("twelve saved values", size, "all_values", all_values) for size in sizes),
        *(_small("one value replaced", size, "one_write", (over_bare, over_hooks)) for size in sizes[:2]),
        *(_case("traced before, now untraced", (_WIDTH, batch), _untraced, untraced) for batch in (1, 32)),
        *(_case("twelve invokes", (width, 1), _invokes, invokes) for width in widths[:2]),
    ]


def _case(
    name: str,
    size: tuple[int, int],
    sides: Callable[[Subject], dict[str, Side]],
    measures: tuple[Measure, ...],
) -> Case:
    width, batch = size

    def make() -> Sampler:
        return CallsByTurns(sides(small_subject(width, batch)))

    return Case(name, f"width {width}, batch {batch}", make, measures)


def _small(name: str, size: tuple[int, int], key: str, measures: tuple[Measure, ...]) -> Case:
    return _case(name, size, partial(_task_sides, key), measures)


def _task_sides(key: str, subject: Subject) -> dict[str, Side]:
    """Return the sides of a task of the comparison with peers, on a model of any size."""
    hooks = getattr(HookWork(subject), key)
    ours = getattr(_traced(subject), key)
    check_same(ours(), hooks())
    return {"ours": ours, "hooks": hooks, "bare": partial(_bare, subject)}


def _traced(subject: Subject) -> TraceWork:
    return TraceWork(nnsight_engine, NNsight(subject.module), subject)


def _bare(subject: Subject) -> None:
    with torch.no_grad():
        subject.module(subject.inputs)


def _untraced(subject: Subject) -> dict[str, Side]:
    """Return sides on the very same weights, so that where they lie in memory makes no difference."""
    twins = {"bare": subject.twin(), "control": subject.twin()}
    _traced(subject).one_value()
    return {name: partial(_bare, one) for name, one in {"ours": subject, **twins}.items()}


def _invokes(subject: Subject) -> dict[str, Side]:
    """Return one invoke with the input and eleven without, beside one invoke alone; and as many hooks."""
    work, hooks = _traced(subject), HookWork(subject)
    model, inputs = NNsight(subject.module), subject.inputs

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

    check_same(work.shared_invokes(), hooks.shared_invokes())
    return {
        "ours": work.shared_invokes,
        "idle": idle,
        "ours alone": alone,
        "hooks": hooks.shared_invokes,
        "hook alone": hooks.one_value,
    }


def _each_further(many: str, alone: str, name: str, target: float | None = None) -> Measure:
    def of(sample: Sample) -> float:
        return 1e6 * (sample[many] - sample[alone]) / (NUM_SMALL_LAYERS - 1)

    return Measure(name, of, target)


def _language_cases(repeats: int) -> list[Case]:
    """Return every case on the language model, which is loaded once, by the first."""
    loaded: list[Language] = []

    def make(sides: Callable[[Language], dict[str, Side]]) -> Sampler:
        if not loaded:
            loaded.append(Language())
        return CallsByTurns(sides(loaded[0]))

    against_hooks = (ratio("ours", "hooks", _LANGUAGE_TARGET),)
    generation = (ratio("ours", "bare", _LANGUAGE_TARGET), ratio("ours", "hooks"))
    named: list[tuple[str, Callable[[Language], dict[str, Side]], tuple[Measure, ...]]] = [
        (f"one layer's output saved at each of {NUM_TOKENS} tokens", Language.generation, generation),
        (
            "activation patching, one MLP layer",
            lambda one: one.patching.activation(slice(15, 16)),
            against_hooks,
        ),
        (
            "activation patching, all MLP layers",
            lambda one: one.patching.activation(slice(None)),
            against_hooks,
        ),
        ("attribution patching, all MLP layers", lambda one: one.patching.attribution(), against_hooks),
    ]
    return [
        Case(name, "SmolLM2", partial(make, sides), measures, "ms", repeats)
        for name, sides, measures in named
    ]


class Language:
    """The language model, as traces and as hooks use it."""

    def __init__(self) -> None:
        """Load it."""
        models = Models(bundled_model_path())
        self._subject = models.subjects[LANGUAGE]
        self._hooks, self._twin = HookWork(self._subject.twin()), self._subject.twin()
        self._traces = works(nnsight_engine, models)[LANGUAGE]
        self.patching = Patching(self._traces.model, self._subject.module)

    def generation(self) -> dict[str, Side]:
        """Return the sides of saving a value at each generated token."""
        ids = self._subject.inputs
        options = {"attention_mask": torch.ones_like(ids), **generation_options()}
        check_same(self._traces.generation(), self._hooks.generation())
        return {
            "ours": self._traces.generation,
            "hooks": self._hooks.generation,
            "bare": lambda: self._twin.module.generate(ids, **options),
        }
