"""What a trace costs inside vLLM's engine, beside plain requests and PyTorch hooks.

A step in which requests are traced, against the same step with hooks that save the same values; and a whole
traced request, from its block to its saved values, against the same request without one. A compiled step runs
no hooks, so there the same step without traces is the baseline. What traces cost requests that have none is
in the serving table: its engine is the same, and idle.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

from vllm import SamplingParams

from benchmarks.case import Case, Measure, Plan, Sample, Sampler, difference
from benchmarks.decoding import Batch, Prompts
from benchmarks.engine import Engine
from benchmarks.interventions import OperationsOf, first_only, nothing, traced
from benchmarks.precision import DTYPE_NAME
from benchmarks.turns import CallsByTurns
from nnsight_engine import save

_LAYER: Final = 15
_PROMPT_TOKENS: Final = 32
_NUM_TURNS: Final = 3
_STEP_TARGET_US: Final = 1000.0
_REQUEST_TARGET_US: Final = 3000.0
_METHOD: Final = """\
SmolLM2-135M-Instruct in {dtype}, {mode}, one engine, in one process. A batch decodes for a while {compared},
with one request traced and with all traced; a step is timed. The last case is a whole request."""
_COMPARED: Final = {
    "eager": "with all of its requests plain, with a hook that saves the same rows",
    "compiled": "with all of its requests plain",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the engine."""
    parser.add_argument("--mode", choices=sorted(_COMPARED), default="eager")
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 32], help="requests that run together")


def plan(args: argparse.Namespace, _stack: contextlib.ExitStack) -> Plan:
    """Load the engine and return the cases."""
    is_eager = args.mode == "eager"
    engine = Engine(able=True, eager=is_eager, max_num_seqs=max(args.batches))
    prompts = Prompts(engine.vocab_size)
    cases = [_steps(engine, prompts, batch, has_hooks=is_eager) for batch in args.batches]
    name, title = "engine-traces", "Traces inside vLLM's engine"
    if not is_eager:
        name, title = f"{name}-compiled", f"{title}, compiled"
    method = _METHOD.format(dtype=DTYPE_NAME, mode=args.mode, compared=_COMPARED[args.mode])
    return Plan(name, title, method, [*cases, _whole_request(engine, prompts)])


def _decoding(engine: Engine, prompts: Prompts, batch: int, *, has_hooks: bool) -> Sampler:
    """Return what decodes with each side for a while, warmed up; seconds of a step."""
    operations_of = traced(lambda _shape: range(_LAYER, _LAYER + 1))
    sides: list[tuple[str, OperationsOf, int]] = [
        ("plain", nothing, 0),
        ("one traced", first_only(operations_of), 0),
        ("all traced", operations_of, 0),
    ]
    if has_hooks:
        sides[1:1] = [("hook of one", nothing, 1), ("hook of all", nothing, batch)]

    def step_s(operations_of: OperationsOf, num_hooked: int) -> float:
        with _hooked(engine.layers[_LAYER], num_hooked):
            requests = Batch(engine, prompts.batch(batch, _PROMPT_TOKENS), operations_of, _NUM_TURNS)
            for _ in range(_NUM_TURNS):
                requests.run_turn()
            return requests.finish()

    def sample() -> Sample:
        sample = {name: step_s(operations_of, num_hooked) for name, operations_of, num_hooked in sides}
        sides.reverse()
        return sample

    sample()
    return sample


@contextlib.contextmanager
def _hooked(layer: Any, num_rows: int) -> Iterator[None]:
    """Save what a layer returns for the first rows of the batch."""
    saved: list[Any] = []

    def hook(_module: Any, _inputs: Any, output: Any) -> None:
        hidden, residual = output
        saved.extend(hidden[row : row + 1] + residual[row : row + 1] for row in range(num_rows))

    handle = layer.register_forward_hook(hook) if num_rows else None
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()


def _steps(engine: Engine, prompts: Prompts, batch: int, *, has_hooks: bool) -> Case:
    def per_trace(variant: str, hook: str, count: int) -> Measure:
        baseline = hook if has_hooks else "plain"
        return Measure(
            f"({variant} - {baseline}) / {count}, µs",
            lambda one: 1e6 * (one[variant] - one[baseline]) / count,
            _STEP_TARGET_US,
        )

    measures = (per_trace("one traced", "hook of one", 1), per_trace("all traced", "hook of all", batch))
    make = partial(_decoding, engine, prompts, batch, has_hooks=has_hooks)
    return Case("a decode step, one layer's output saved", f"batch {batch}", make, measures)


def _whole_request(engine: Engine, prompts: Prompts) -> Case:
    """Return the case of a request of one token on an idle engine."""
    model, (prompt,) = engine.able_model, Prompts(engine.vocab_size).batch(1, 8)
    params = SamplingParams(max_tokens=1, temperature=0.0)

    def plain() -> None:
        model.engine.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)

    def ours() -> None:
        with model.trace(prompt, temperature=0.0):
            save(model.layers[_LAYER].output)

    def make() -> Sampler:
        whole = CallsByTurns({"plain": plain, "traced": ours}, repetition_s=1.0)
        decoding = _decoding(engine, prompts, 1, has_hooks=False)

        def sample() -> Sample:
            steps = decoding()
            return {**whole(), "plain step": steps["plain"], "traced step": steps["one traced"]}

        return sample

    around = Measure(
        "(traced - plain) - (traced step - plain step), µs",
        lambda one: 1e6 * (one["traced"] - one["plain"] - one["traced step"] + one["plain step"]),
        _REQUEST_TARGET_US,
    )
    name = "a request of one token, one value saved: attaching and collecting, and all of it"
    return Case(name, "8 tokens", make, (around, difference("traced", "plain")))
