"""How long the server takes from its command to its first token, beside vLLM's own server.

The bundled model is converted before the clock starts, as it is on every start but the first. With
``--compile`` ours is started eager too, and the difference is what compiling costs at each start. What
follows ``--`` are engine arguments of vLLM, for every side.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import httpx

from benchmarks.case import Case, Measure, Plan, Sample, Sampler, ratio
from benchmarks.precision import DTYPE_NAME
from benchmarks.servers import MODEL_NAME, Side, command_of, served_by
from nnsight_engine.modeling.bundled import bundled_model_path

_TARGET_S: Final = 20.0
_OURS, _VLLM, _EAGER = str(Side.OURS), str(Side.VLLM), "ours, eager"
_TOKEN_LIMIT_S: Final = 60.0
_METHOD: Final = f"""\
`nnsight-engine serve` and vLLM's `api_server` with SmolLM2-135M-Instruct in {DTYPE_NAME} and the same
environment and engine arguments, started by turns, each alone: seconds from the command until a completion of
one token is answered, polled every 50 ms; "listening" is the first answer of any kind, "ready" what readiness
checks see. The first start is not counted."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the engines."""
    parser.add_argument("--compile", action="store_true", help="compiled engines, and what that costs")


def plan(args: argparse.Namespace, _stack: contextlib.ExitStack) -> Plan:
    """Return the case."""
    mode = "compiled" if args.compile else "eager"
    sides = {
        str(side): partial(_started, side, args.rest, compiled=args.compile)
        for side in (Side.OURS, Side.VLLM)
    }
    if args.compile:
        sides[_EAGER] = partial(_started, Side.OURS, args.rest, compiled=False)
    case = Case(
        "from the command to the first token", mode, partial(_warmed_up, sides), _measures(args.compile), "s"
    )
    return Plan(f"startup-{mode}", f"Start-up, {mode}", _METHOD, [case])


def _measures(is_compiled: bool) -> tuple[Measure, ...]:  # noqa: FBT001 - one of two
    against = ratio(_OURS, _VLLM)
    if not is_compiled:
        return Measure("ours, seconds", lambda one: one[_OURS], _TARGET_S), against
    price = Measure("price of compiling, seconds", lambda one: one[_OURS] - one[_EAGER])
    return Measure("ours, seconds", lambda one: one[_OURS]), price, against


def _warmed_up(sides: Mapping[str, Callable[[], Sample]]) -> Sampler:
    """Start ours once, so that its files are in memory for every start that counts."""
    sides[_OURS]()
    order = list(sides)

    def sample() -> Sample:
        sample: dict[str, float] = {}
        for name in order:
            sample |= {f"{name}{moment}": seconds for moment, seconds in sides[name]().items()}
        order.reverse()
        return sample

    return sample


def _started(side: Side, options: list[str], *, compiled: bool) -> Sample:
    """Start a server and stop it; return when it listened, was ready and had answered with a token."""
    command = command_of(side, str(bundled_model_path()), compiled=compiled, options=options)
    with served_by(side, command) as server:
        body = {"model": MODEL_NAME, "prompt": [1], "max_tokens": 1}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=_TOKEN_LIMIT_S)
        answer.raise_for_status()
        return {"": server.seconds(), ", ready": server.ready_s, ", listening": server.listening_s}
