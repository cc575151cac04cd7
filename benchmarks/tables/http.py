"""Our server compared with vLLM's own, over HTTP.

Both servers are up, with the same engine arguments and environment, and loaded by turns by
`vllm bench serve`, a process of its own on the same cores. A round is three requests for each that runs at
once, prompts of 32 random tokens, greedy answers of 32; the next one begins where one ends. Sides are a
round's time by its requests, the median time to a first token, and the median time between two tokens.
Control: vLLM's own server against itself.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import tempfile
from functools import partial
from typing import Final

from benchmarks.case import BenchmarkCase, Measure, Plan, Sample, Sampler, ratio
from benchmarks.http_load import STREAMED, WHOLE, LoadOutcome, load_process
from benchmarks.servers import ServerKind, command_of, created_key, own_folders, running
from benchmarks.tables import HUGE_PAGES
from benchmarks.turns import by_turns
from nnsight_engine.modeling.bundled import bundled_model_path

_TARGET: Final = 0.97
_TARGET_CONCURRENCY: Final = 32
_OURS, _VLLM, _AGAIN = str(ServerKind.OURS), str(ServerKind.VLLM), "vLLM's own again"
_BACKENDS: Final = {"whole": WHOLE, "streamed": STREAMED}
_ENGINE: Final = ("--max-model-len", "1024", "--max-num-seqs", "64")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of servers and load."""
    parser.add_argument("--mode", choices=["eager", "compiled"], default="eager")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[_TARGET_CONCURRENCY])
    parser.add_argument(
        "--kinds", choices=list(_BACKENDS), nargs="+", default=list(_BACKENDS), help="how answers come"
    )
    parser.add_argument("--keyed", action="store_true", help="a key on our side, so that use is metered")


def plan(args: argparse.Namespace, stack: contextlib.ExitStack) -> Plan:
    """Start both servers and the client, and return the cases."""
    variables = {
        **HUGE_PAGES,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        **own_folders(stack.enter_context(tempfile.TemporaryDirectory())),
    }
    key = created_key("one", variables) if args.keyed else ""  # vLLM's own server ignores it
    urls = {}
    for side in ServerKind:
        command = command_of(
            side, str(bundled_model_path()), compiled=args.mode == "compiled", options=_ENGINE
        )
        urls[str(side)] = stack.enter_context(running(command, variables)).url
    urls[_AGAIN] = urls[_VLLM]
    client = stack.enter_context(load_process())

    # No prompt is sent twice, so that none is in the prefix cache; the control has its own.
    seeds = {name: itertools.count(int(name == _AGAIN), 2) for name in urls}

    def sampler(concurrency: int, kind: str) -> Sampler:
        def round_of(name: str) -> Sample:
            outcome: LoadOutcome = client.call(
                "send",
                urls[name],
                key,
                _BACKENDS[kind],
                max_concurrency=concurrency,
                num_prompts=max(4, 3 * concurrency),
                random_input_len=32,
                random_output_len=32,
                seed=next(seeds[name]),
            )
            first = statistics.median(outcome.first_s)
            if kind == "whole":
                return {"": outcome.request_s, ", whole answer": first}
            between = statistics.median(outcome.gaps_s)
            return {"": outcome.request_s, ", first token": first, ", between tokens": between}

        return by_turns({name: partial(round_of, name) for name in urls})

    cases = [
        BenchmarkCase(
            f"{number} at once", kind, partial(sampler, number, kind), _measures(number, kind), "ms"
        )
        for number in args.concurrency
        for kind in args.kinds
    ]
    return Plan(cases, f"-{args.mode}{'-keyed' if args.keyed else ''}")


def _measures(concurrency: int, kind: str) -> tuple[Measure, ...]:
    """Return the ratios of rates, which are those of times turned round, and of times."""
    target = _TARGET if concurrency == _TARGET_CONCURRENCY else None
    moments = ["whole answer"] if kind == "whole" else ["first token", "between tokens"]
    return (
        ratio(_VLLM, _OURS, target, is_floor=True),
        ratio(_VLLM, _AGAIN),
        *(ratio(f"{_OURS}, {moment}", f"{_VLLM}, {moment}") for moment in moments),
    )
