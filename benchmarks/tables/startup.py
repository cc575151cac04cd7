"""The time of the server from its command to its first token, compared with vLLM's own server.

Both with the same environment and engine arguments, those after ``--`` included, started by turns, each
alone: seconds from the command until a completion of one token is answered, polled every 50 ms; "listening"
is the first answer of any kind, "ready" is seen by readiness checks. The model is converted before, as on
every start but the first, and the first start is not counted. With ``--compile`` ours is started eager too:
the difference is the cost of compiling at each start.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from functools import partial
from typing import Final

import httpx

from benchmarks.case import BenchmarkCase, Measure, Plan, Sample, Sampler, difference, ratio, total
from benchmarks.servers import MODEL_NAME, ServerKind, command_of, running
from benchmarks.turns import by_turns
from nnsight_engine.modeling.bundled import bundled_model_path

_TARGET_S: Final = 20.0
_OURS, _VLLM, _EAGER = str(ServerKind.OURS), str(ServerKind.VLLM), "ours, eager"
_TOKEN_LIMIT_S: Final = 60.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the engines."""
    parser.add_argument("--compile", action="store_true", help="compiled engines, and what that costs")


def plan(args: argparse.Namespace, _stack: contextlib.ExitStack) -> Plan:
    """Return the case."""
    kinds = {_OURS: (ServerKind.OURS, args.compile), _VLLM: (ServerKind.VLLM, args.compile)}
    mode, target = ("compiled", None) if args.compile else ("eager", _TARGET_S)
    measures: tuple[Measure, ...] = (total("ours, s", {_OURS: 1}, target=target), ratio(_OURS, _VLLM))
    if args.compile:
        kinds[_EAGER] = (ServerKind.OURS, False)
        measures += (difference(_OURS, _EAGER, "s"),)
    sides = {
        name: partial(_started, kind, args.engine_arguments, compiled=compiled)
        for name, (kind, compiled) in kinds.items()
    }

    def make() -> Sampler:
        sides[_OURS]()  # its files are then in memory for every start that counts
        return by_turns(sides, num_warmups=0)

    return Plan([BenchmarkCase("from the command to the first token", mode, make, measures, "s")], f"-{mode}")


def _started(kind: ServerKind, options: list[str], *, compiled: bool) -> Sample:
    """Start a server and stop it; returns when it listened, was ready and had answered with a token."""
    command = command_of(kind, str(bundled_model_path()), compiled=compiled, options=options)
    with running(command) as server:
        body = {"model": MODEL_NAME, "prompt": [1], "max_tokens": 1}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=_TOKEN_LIMIT_S)
        answer.raise_for_status()
        seconds = time.perf_counter() - server.began
        return {"": seconds, ", ready": server.ready_s, ", listening": server.listening_s}
