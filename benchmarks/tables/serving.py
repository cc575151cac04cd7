"""Speed of an engine that can intervene, against plain vLLM on the same machine.

Two plain engines and one of ours live in each process, with the same arguments. The control pairs the plain
ones: how far its ratio is from 1 is the error of the measurement. ``--only``, ``--batches`` and
``--quantity`` make shorter runs, of which ``--add`` makes one table.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import enum
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

from benchmarks.case import Case, Plan, Sample, Sampler, ratio, rotated
from benchmarks.decoding import TURN_STEPS, Batch, Prompts, first_token_s, mirrored
from benchmarks.engine import Engine
from benchmarks.interventions import (
    JsonObject,
    OperationsOf,
    captured,
    every,
    first_only,
    lens,
    middle,
    nothing,
    steered,
    traced,
)
from benchmarks.precision import DTYPE_NAME

ANY_SIZE: Final = 0
"""Key of a target that holds for every number of requests."""

_QUICK_STEPS: Final = 2 * TURN_STEPS
_LONG_PROMPT_REQUESTS: Final = 8
"""Requests that decode behind long prompts, at most: the short ones show how a batch's size matters."""

_FIRST_TOKEN_ROUNDS: Final = 4
"""Requests on each side in one repetition of a first-token case."""

_METHOD: Final = """\
SmolLM2-135M-Instruct in {dtype}, {mode}, {steps} timed decode steps a repetition. All engines live in one
process with the same arguments and take strict turns. The control's distance from 1 is the error of the
measurement. Decoding is compared by throughput, first tokens by time."""


class Quantity(enum.StrEnum):
    """What a case measures."""

    DECODE = "decode"
    FIRST_TOKEN = "first_token"  # noqa: S105 - not a password


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
    """One way of using an engine.

    Attributes:
        targets: Ratio to plain vLLM, by number of requests or ``ANY_SIZE``. That of throughput is a minimum
            and holds for the compiled engine, as throughput matters there; that of time is a maximum.
        max_requests: Most requests with which it is run; None is no limit.
        bound: What limits it, shown where a target is missed.
    """

    name: str
    operations_of: OperationsOf
    targets: Mapping[int, float] = dataclasses.field(default_factory=dict)
    quantity: Quantity = Quantity.DECODE
    max_requests: int | None = None
    is_control: bool = False
    bound: str = ""

    def target(self, num_requests: int, mode: str) -> float | None:
        """Return the ratio to reach, None where none is set."""
        if self.quantity is Quantity.DECODE and mode != "compiled":
            return None
        return self.targets.get(num_requests, self.targets.get(ANY_SIZE))


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """A variant with a batch and a prompt length."""

    variant: Variant
    num_requests: int
    prompt_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class Engines:
    """What lives in one process; the control is another plain one."""

    plain: Engine
    ours: Engine
    control: Engine
    prompts: Prompts

    def decode(self, choice: Choice, num_turns: int) -> Sample:
        """Decode on both sides by turns; tokens a second."""
        variant = choice.variant
        prompts = self.prompts.batch(choice.num_requests, choice.prompt_tokens)
        plain = Batch(self.plain, prompts, nothing, num_turns)
        ours = Batch(
            self.control if variant.is_control else self.ours, prompts, variant.operations_of, num_turns
        )
        for batch in mirrored(plain, ours, num_turns):
            batch.run_turn()
        return {"ours": choice.num_requests / ours.finish(), "plain": choice.num_requests / plain.finish()}

    def first_token(self, choice: Choice) -> Sample:
        """Request a first token on both sides by turns; seconds."""
        seconds = {"ours": 0.0, "plain": 0.0}
        prompts = self.prompts.batch(_FIRST_TOKEN_ROUNDS, choice.prompt_tokens)
        left = {"ours": list(prompts), "plain": list(prompts)}
        for side in mirrored("plain", "ours", _FIRST_TOKEN_ROUNDS):
            engine = self.ours if side == "ours" else self.plain
            content = choice.variant.operations_of(0, engine.shape) if side == "ours" else []
            seconds[side] += first_token_s(engine, left[side].pop(), content) / _FIRST_TOKEN_ROUNDS
        return seconds


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose cases and their length."""
    parser.add_argument("--mode", choices=["eager", "compiled"], default="compiled")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64], help="requests together")
    parser.add_argument("--prompts", type=int, nargs="+", default=[16, 512], help="tokens of the prompts")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORDS", help="cases with this in their name"
    )
    parser.add_argument("--quantity", choices=list(Quantity), help="either throughput or time to first token")
    parser.add_argument("--steps", type=int, default=48, help=f"timed steps, a multiple of {TURN_STEPS}")


def plan(args: argparse.Namespace, _stack: contextlib.ExitStack) -> Plan:
    """Load the engines and return the cases."""
    steps = min(args.steps, _QUICK_STEPS) if args.quick else args.steps
    choices = chosen(args.batches, args.prompts, args.only, args.quantity)
    engines = _engines(args, choices) if choices else None
    cases = [case_of(choice, args.mode, engines, steps // TURN_STEPS) for choice in choices]
    method = _METHOD.format(dtype=DTYPE_NAME, mode=args.mode, steps=steps)
    return Plan(args.mode, f"Against plain vLLM, {args.mode}", method, cases, in_rounds=True)


def chosen(
    batches: Sequence[int], prompts: Sequence[int], words: Sequence[str], quantity: str | None
) -> list[Choice]:
    """Return every case with one of the words in its name, all where there are no words.

    Every batch decodes behind the shortest prompt; behind longer ones only the largest batch of few requests
    does, since what they change is attention's share of a step.
    """
    few = [batch for batch in batches if batch <= _LONG_PROMPT_REQUESTS]
    found = []
    for variant in VARIANTS:
        if (words and not any(word in variant.name for word in words)) or quantity not in (
            None,
            variant.quantity,
        ):
            continue
        for length in prompts:
            sizes = batches if length == min(prompts) else ([max(few)] if few else [])
            sizes = [1] if variant.quantity is Quantity.FIRST_TOKEN else sizes
            limit = variant.max_requests or max(sizes, default=0)
            found += [Choice(variant, size, length) for size in sizes if size <= limit]
    return found


def case_of(choice: Choice, mode: str, engines: Engines | None, num_turns: int) -> Case:
    """Return a choice's case on some engines."""
    variant, is_decode = choice.variant, choice.variant.quantity is Quantity.DECODE

    def make() -> Sampler:
        assert engines is not None  # noqa: S101 - loaded where there are cases
        sampler = (
            partial(engines.decode, choice, num_turns) if is_decode else partial(engines.first_token, choice)
        )
        sampler()  # warms up
        return sampler

    target = variant.target(choice.num_requests, mode)
    measure = ratio("ours", "plain", target, is_floor=is_decode, bound=variant.bound)
    size = f"{choice.num_requests} requests, {choice.prompt_tokens} tokens"
    name = variant.name if is_decode else f"first token: {variant.name}"
    return Case(name, size, make, (measure,), "tokens/s" if is_decode else "ms")


def _engines(args: argparse.Namespace, choices: Sequence[Choice]) -> Engines:
    """Load them, each process in another order."""
    able = {"plain": False, "ours": True, "control": False}
    engines = {
        name: Engine(
            able=able[name],
            eager=args.mode == "eager",
            max_num_seqs=max(one.num_requests for one in choices),
            max_step_tokens=max(one.num_requests * one.prompt_tokens for one in choices),
        )
        for name in rotated(list(able), args.process % len(able))
    }
    for engine in engines.values():
        engine.check_taps()
    return Engines(**engines, prompts=Prompts(engines["plain"].vocab_size))


_GENERATED: Final[JsonObject] = {"phase": "generated"}
_LAST: Final[JsonObject] = {"positions": [-1]}
_LENS_BOUND: Final = (
    "A lens multiplies by the unembedding once for each layer and request, the step itself once for each "
    "request; in this small model that matrix has a fifth of all weights."
)
_TAPS_BOUND: Final = "What idle taps cost is mostly that the compiler cannot fuse across them."
_CAPTURE_BOUND: Final = "One copy at each layer and step, which nothing in the step would make otherwise."
_TRACE_BOUND: Final = (
    "The model's thread hands over to the block's and back twice in each step, on cores that the model has "
    "busy; the switches are a third of it, the rest some 400 calls of Python per step, with cold caches."
)

VARIANTS: Final = (
    Variant("(control: plain vLLM again)", nothing, is_control=True),
    Variant("idle", nothing, {ANY_SIZE: 0.985}, bound=_TAPS_BOUND),
    Variant("one request steered", first_only(steered(middle)), {8: 0.975}, bound=_TAPS_BOUND),
    Variant("every request steered alike, one layer", steered(middle, alike=True)),
    Variant("every request its own vector, one layer", steered(middle), {64: 0.97}),
    Variant("every request its own vector, all layers", steered(every), {64: 0.93}),
    Variant(
        "last token captured, all layers",
        captured(every, "generated", "last"),
        {ANY_SIZE: 0.92},
        bound=_CAPTURE_BOUND,
    ),
    Variant("every token captured, all layers", captured(every, "generated")),
    Variant(
        "lens of one request, all layers", first_only(lens(_GENERATED)), {ANY_SIZE: 0.60}, bound=_LENS_BOUND
    ),
    Variant(
        "lens of every request, all layers",
        lens(_GENERATED),
        {ANY_SIZE: 0.60},
        max_requests=8,
        bound=_LENS_BOUND,
    ),
    Variant("one request traced, one layer saved", first_only(traced(middle)), {8: 0.95}, bound=_TRACE_BOUND),
    Variant("every request traced, one layer saved", traced(middle)),
    Variant("idle", nothing, quantity=Quantity.FIRST_TOKEN),
    Variant("one steer", steered(middle), {ANY_SIZE: 1.10}, quantity=Quantity.FIRST_TOKEN),
    Variant("every token captured, all layers", captured(every, "prompt"), quantity=Quantity.FIRST_TOKEN),
    Variant("lens of the last token, all layers", lens(_LAST), quantity=Quantity.FIRST_TOKEN),
)
