"""An engine that can intervene compared with plain vLLM.

Two plain engines and one of ours live in each process, with the same arguments, and take strict turns. The
control pairs the plain ones: how far its ratio is from 1 is the error of the measurement. Decoding is
compared by throughput, first tokens by time. `--only`, `--batches` and `--quantity` make shorter runs, which
`--add` combines in one table. `--model` measures with another model than the bundled one.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

from benchmarks.case import BenchmarkCase, Plan, Sample, Sampler, ratio
from benchmarks.decoding import TURN_STEPS, DecodingBatch, RandomPrompts, first_token_s, mirrored
from benchmarks.engine import BenchmarkError, StepwiseEngine
from benchmarks.interventions import (
    ContentOf,
    captured,
    changed_features,
    conditional,
    every,
    first_only,
    lens,
    middle,
    nothing,
    steered,
    top_features,
    traced,
)

ANY_SIZE: Final = 0
"""Key of a target that holds for every number of requests."""

_QUICK_STEPS: Final = 2 * TURN_STEPS
_LONG_PROMPT_REQUESTS: Final = 8
"""Most requests that decode after long prompts: the short ones show the effect of a batch's size."""

_FIRST_TOKEN_ROUNDS: Final = 4
"""Requests on each side in one repetition of a first-token case."""


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
    """One way of using an engine.

    Attributes:
        targets: Ratio to plain vLLM, by number of requests or ``ANY_SIZE``. That of throughput is a minimum
            and holds for the compiled engine, as throughput matters there; that of time is a maximum.
        max_requests: Most requests with which it is run; None is no limit.
        is_decode: Whether throughput is measured; otherwise it is the time to the first token.
        bound: The reason of its limit, shown where a target is missed.
    """

    name: str
    content_of: ContentOf
    targets: Mapping[int, float] = dataclasses.field(default_factory=dict)
    max_requests: int | None = None
    is_decode: bool = True
    is_control: bool = False
    bound: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """A variant with a batch and a prompt length."""

    variant: Variant
    num_requests: int
    prompt_tokens: int

    def case(self, mode: str, engines: _Engines | None, num_turns: int) -> BenchmarkCase:
        """Return its case on some engines."""
        variant, is_decode = self.variant, self.variant.is_decode

        def make() -> Sampler:
            assert engines is not None  # noqa: S101 - loaded where there are cases
            decode = partial(engines.decode, self, num_turns)
            sampler = engines.drained(decode if is_decode else partial(engines.first_token, self))
            sampler()  # warms up
            return sampler

        target = variant.targets.get(self.num_requests, variant.targets.get(ANY_SIZE))
        if is_decode and mode != "compiled":
            target = None
        measure = ratio("ours", "plain", target, is_floor=is_decode, bound=variant.bound)
        size = f"{self.num_requests} requests, {self.prompt_tokens} tokens"
        name = variant.name if is_decode else f"first token: {variant.name}"
        return BenchmarkCase(name, size, make, (measure,), "tokens/s" if is_decode else "ms")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose cases and their length."""
    parser.add_argument("--mode", choices=["eager", "compiled"], default="compiled")
    parser.add_argument("--model", default="", help="folder of a model, by default the bundled one")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64], help="requests together")
    parser.add_argument("--prompts", type=int, nargs="+", default=[16, 512], help="tokens of the prompts")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORDS", help="cases with this in their name"
    )
    parser.add_argument("--quantity", choices=["decode", "first_token"], help="throughput, or first tokens")
    parser.add_argument("--steps", type=int, default=48, help=f"timed steps, a multiple of {TURN_STEPS}")


def plan(args: argparse.Namespace, _stack: contextlib.ExitStack) -> Plan:
    """Load the engines and return the cases."""
    workloads = chosen(VARIANTS, args.batches, args.prompts, args.only, args.quantity)
    return plan_of(workloads, args, args.mode, args.model)


def plan_of(
    workloads: Sequence[Workload],
    args: argparse.Namespace,
    mode: str,
    model: str,
    *,
    is_random: bool = False,
) -> Plan:
    """Load the engines and return the cases of some workloads; the rest is as in ``_Engines``."""
    steps = min(args.steps, _QUICK_STEPS) if args.quick else args.steps
    engines = _Engines(args.process, workloads, mode, model, is_random=is_random) if workloads else None
    cases = [one.case(mode, engines, steps // TURN_STEPS) for one in workloads]
    return Plan(cases, f"-{mode}", in_rounds=True)


def chosen(
    variants: Sequence[Variant],
    batches: Sequence[int],
    prompts: Sequence[int],
    words: Sequence[str],
    quantity: str | None,
) -> list[Workload]:
    """Return every workload with one of the words in its name, all where there are no words.

    Every batch decodes after the shortest prompt; after longer ones only the largest batch of few requests
    does, since they change attention's share of a step.
    """
    few = [batch for batch in batches if batch <= _LONG_PROMPT_REQUESTS]
    found = []
    for variant in variants:
        if words and not any(word in variant.name for word in words):
            continue
        if quantity is not None and (quantity == "decode") != variant.is_decode:
            continue
        for length in prompts:
            sizes: Sequence[int] = batches if length == min(prompts) else few and [max(few)]
            sizes = sizes if variant.is_decode else [1]
            limit = variant.max_requests or max(sizes, default=0)
            found += [Workload(variant, size, length) for size in sizes if size <= limit]
    return found


class _Engines:
    """The engines of one process, in another order in each process; the control is another plain one."""

    def __init__(
        self, process: int, workloads: Sequence[Workload], mode: str, model: str, *, is_random: bool
    ) -> None:
        names = ["plain", "ours", "control"]
        first = process % len(names)
        self._engines = {
            name: StepwiseEngine(
                able=name == "ours",
                eager=mode == "eager",
                max_num_seqs=max(one.num_requests for one in workloads),
                max_step_tokens=max(one.num_requests * one.prompt_tokens for one in workloads),
                model=model,
                is_random=is_random,
            )
            for name in names[first:] + names[:first]
        }
        for engine in self._engines.values():
            engine.check_taps()
        if self._engines["ours"].compile_key == self._engines["plain"].compile_key:
            raise BenchmarkError("our engine and the plain one must not share compiled graphs, they do")
        self._prompts = RandomPrompts(self._engines["plain"].vocab_size)

    def drained(self, sampler: Sampler) -> Sampler:
        """Return a sampler that leaves no requests behind where it fails."""

        def sample() -> Sample:
            try:
                return sampler()
            finally:
                for engine in self._engines.values():
                    engine.drain()

        return sample

    def decode(self, workload: Workload, num_turns: int) -> Sample:
        """Decode on both sides by turns; tokens a second."""
        variant, count = workload.variant, workload.num_requests
        ours = self._engines["control" if variant.is_control else "ours"]
        prompts = self._prompts.batch(count, workload.prompt_tokens)
        plain_batch = DecodingBatch(self._engines["plain"], prompts, nothing, num_turns)
        our_batch = DecodingBatch(ours, prompts, variant.content_of, num_turns)
        for batch in mirrored(plain_batch, our_batch, num_turns):
            batch.run_turn()
        return {"ours": count / our_batch.finish(), "plain": count / plain_batch.finish()}

    def first_token(self, workload: Workload) -> Sample:
        """Request a first token on both sides by turns; seconds."""
        seconds = {"ours": 0.0, "plain": 0.0}
        prompts = self._prompts.batch(_FIRST_TOKEN_ROUNDS, workload.prompt_tokens)
        left = {"ours": list(prompts), "plain": list(prompts)}
        for side in mirrored("plain", "ours", _FIRST_TOKEN_ROUNDS):
            engine = self._engines[side]
            content = workload.variant.content_of(0, engine.shape) if side == "ours" else []
            seconds[side] += first_token_s(engine, left[side].pop(), content) / _FIRST_TOKEN_ROUNDS
        return seconds


_LENS_BOUND: Final = (
    "A lens multiplies by the unembedding once for each layer and request, the step itself once for each "
    "request; in this small model that matrix has a fifth of all weights."
)
_TAPS_BOUND: Final = "The cost of idle taps is mostly that the compiler cannot fuse across them."
_CAPTURE_BOUND: Final = "One copy at each layer and step, which nothing in the step would make otherwise."
_TRACE_BOUND: Final = (
    "The model's thread hands over to the block's and back twice in each step, on cores that the model has "
    "busy; the switches are a third of it, the rest some 400 calls of Python per step, with cold caches."
)
_LENS: Final = lens({"phase": "generated"})
_CAPTURE: Final = captured(every, "generated", "last")
_first_token: Final = partial(Variant, is_decode=False)
_traced_variant: Final = partial(Variant, bound=_TRACE_BOUND)
_lens_variant: Final = partial(Variant, targets={ANY_SIZE: 0.60}, bound=_LENS_BOUND)

VARIANTS: Final = (
    Variant("(control: plain vLLM again)", nothing, is_control=True),
    Variant("idle", nothing, {ANY_SIZE: 0.985}, bound=_TAPS_BOUND),
    Variant("one request steered", first_only(steered(middle)), {8: 0.98}, bound=_TAPS_BOUND),
    Variant("every request steered alike, one layer", steered(middle, alike=True)),
    Variant("every request its own vector, one layer", steered(middle), {64: 0.99}),
    Variant("every request its own vector, all layers", steered(every), {64: 0.96}),
    Variant("every request its own condition, one layer", conditional(middle), {64: 0.98}),
    Variant("every request its own condition over 8 tokens, one layer", conditional(middle, window=8)),
    Variant("ten top features of every request, one layer", top_features(middle), {64: 0.93}),
    Variant("every request its own features changed, one layer", changed_features(middle)),
    Variant("last token captured, all layers", _CAPTURE, {ANY_SIZE: 0.96}, bound=_CAPTURE_BOUND),
    Variant("every token captured, all layers", captured(every, "generated")),
    _lens_variant("lens of one request, all layers", first_only(_LENS)),
    _lens_variant("lens of every request, all layers", _LENS, max_requests=8),
    _traced_variant("one request traced, one layer saved", first_only(traced(middle)), {8: 0.95}),
    _traced_variant("every request traced, one layer saved", traced(middle)),
    _first_token("idle", nothing),
    _first_token("one steer", steered(middle), {ANY_SIZE: 1.10}),
    _first_token("every token captured, all layers", captured(every, "prompt")),
    _first_token("lens of the last token, all layers", lens({"positions": [-1]})),
)
