"""Traces inside vLLM's engine, compared with plain requests and PyTorch hooks.

A batch decodes for a while with all of its requests plain, with a hook that saves the same rows, with one
request traced and with all traced; a step is timed. A compiled step runs no hooks, so there plain steps are
the baseline. The last case is a whole request, from its block to its saved values. The serving table has
the cost of traces for requests without any: its engine is the same, and idle.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

from vllm import SamplingParams

from benchmarks.case import BenchmarkCase, Plan, Sample, Sampler, difference, total
from benchmarks.decoding import DecodingBatch, RandomPrompts
from benchmarks.engine import StepwiseEngine
from benchmarks.interventions import ContentOf, first_only, nothing, traced
from benchmarks.turns import CallsByTurns, by_turns
from nnsight_engine import save

_LAYER: Final = 15
_NUM_TURNS: Final = 3
_STEP_TARGET_US: Final = 1000.0
_REQUEST_TARGET_US: Final = 3000.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the engine and its requests."""
    parser.add_argument("--mode", choices=["eager", "compiled"], default="eager")
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 32], help="requests that run together")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of the prompts")


def plan(args: argparse.Namespace, _stack: contextlib.ExitStack) -> Plan:
    """Load the engine and return the cases."""
    most, is_eager = max(args.batches), args.mode == "eager"
    engine = StepwiseEngine(able=True, eager=is_eager, max_num_seqs=most, max_step_tokens=most * args.prompt)
    prompts = RandomPrompts(engine.vocab_size)

    def case(batch: int) -> BenchmarkCase:
        measures = []
        for variant, hook, count in (("one traced", "hook of one", 1), ("all traced", "hook of all", batch)):
            baseline = hook if is_eager else "plain"
            name = f"({variant} - {baseline}) / {count}, µs"
            measures.append(total(name, {variant: 1, baseline: -1}, 1e6 / count, _STEP_TARGET_US))
        make = partial(_decoding, engine, prompts, batch, args.prompt, has_hooks=is_eager)
        name = "a decode step, one layer's output saved"
        return BenchmarkCase(name, f"batch {batch}, {args.prompt} tokens", make, tuple(measures))

    whole = _whole_request(engine, partial(_decoding, engine, prompts, 1, args.prompt, has_hooks=False))
    return Plan([*map(case, args.batches), whole], f"-{args.mode}")


def _decoding(
    engine: StepwiseEngine, prompts: RandomPrompts, batch: int, num_tokens: int, *, has_hooks: bool
) -> Sampler:
    """Return a sampler that decodes with each side for a while; seconds of a step."""
    content_of = traced(lambda _shape: range(_LAYER, _LAYER + 1))

    def step_s(content_of: ContentOf, num_hooked: int = 0) -> Sample:
        with _hooked(engine.layers[_LAYER], num_hooked):
            requests = DecodingBatch(engine, prompts.batch(batch, num_tokens), content_of, _NUM_TURNS)
            for _ in range(_NUM_TURNS):
                requests.run_turn()
            return {"": requests.finish()}

    hooks = {"hook of one": partial(step_s, nothing, 1), "hook of all": partial(step_s, nothing, batch)}
    return by_turns(
        {
            "plain": partial(step_s, nothing),
            **(hooks if has_hooks else {}),
            "one traced": partial(step_s, first_only(content_of)),
            "all traced": partial(step_s, content_of),
        }
    )


@contextlib.contextmanager
def _hooked(layer: Any, num_rows: int) -> Iterator[None]:
    """Save a layer's output for the first rows of the batch."""
    saved: list[Any] = []

    def hook(_module: Any, _inputs: Any, output: Any) -> None:
        hidden, residual = output
        saved.extend(hidden[row : row + 1] + residual[row : row + 1] for row in range(num_rows))

    with contextlib.ExitStack() as stack:
        if num_rows:
            stack.callback(layer.register_forward_hook(hook).remove)
        yield


def _whole_request(engine: StepwiseEngine, decoding: Callable[[], Sampler]) -> BenchmarkCase:
    """Return the case of a request of one token on an idle engine."""
    model, (prompt,) = engine.able_model, RandomPrompts(engine.vocab_size).batch(1, 8)
    params = SamplingParams(max_tokens=1, temperature=0.0)

    def plain() -> None:
        model.engine.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)

    def ours() -> None:
        with model.trace(prompt, temperature=0.0):
            save(model.layers[_LAYER].output)

    def make() -> Sampler:
        whole, steps = CallsByTurns({"plain": plain, "traced": ours}, repetition_s=1.0), decoding()

        def sample() -> Sample:
            one = steps()
            return {**whole(), "plain step": one["plain"], "traced step": one["one traced"]}

        return sample

    weights = {"traced": 1, "plain": -1, "traced step": -1, "plain step": 1}
    around = total("(traced - plain) - (traced step - plain step), µs", weights, 1e6, _REQUEST_TARGET_US)
    name = "a request of one token, one value saved: attaching and collecting, and all of it"
    return BenchmarkCase(name, "8 tokens", make, (around, difference("traced", "plain")))
