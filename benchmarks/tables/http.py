"""What our server costs beside vLLM's own, over HTTP: plain completions, streamed and whole.

Both servers are up, with the same engine arguments, and only one of them is loaded at a time, in short rounds
by turns; a second round of vLLM's own against its first is the control. ``vllm bench serve`` is the client.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import tempfile
from functools import partial
from typing import Final

from benchmarks.case import Case, Measure, Plan, Sample, Sampler, ratio
from benchmarks.clients.http_load import Load, LoadProcess
from benchmarks.precision import DTYPE_NAME
from benchmarks.process import HUGE_PAGES
from benchmarks.servers import Side, command_of, created_key, own_folders, served_by
from nnsight_engine.modeling.bundled import bundled_model_path

_TARGET: Final = 0.97
_TARGET_CONCURRENCY: Final = 32
_OURS, _VLLM, _AGAIN = str(Side.OURS), str(Side.VLLM), "vLLM's own again"
_KINDS: Final = ("whole", "streamed")
_ENGINE: Final = ("--max-model-len", "1024", "--max-num-seqs", "64")
_METHOD: Final = """\
SmolLM2-135M-Instruct in {dtype}, {mode}, by `nnsight-engine serve`, {keyed}, and by vLLM's `api_server`, with
the same engine arguments and environment. Both are up, and loaded by turns by `vllm bench serve`, a process
of its own on the same cores. A round is three requests for each that runs at once, prompts of 32 random
tokens, greedy answers of 16 to 48; the next one begins where one ends. Sides are a round's time by its
requests, the median time to a first token, and the median time between two tokens. Control: vLLM's own
server against itself."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of servers and load."""
    parser.add_argument("--mode", choices=["eager", "compiled"], default="eager")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[_TARGET_CONCURRENCY])
    parser.add_argument("--kinds", choices=_KINDS, nargs="+", default=list(_KINDS), help="how answers come")
    parser.add_argument("--keyed", action="store_true", help="a key on our side, so that use is metered")


def plan(args: argparse.Namespace, stack: contextlib.ExitStack) -> Plan:
    """Start both servers and the client, and return the cases."""
    servers = Servers(args.mode, stack, is_keyed=args.keyed)
    cases = [
        Case(
            f"{concurrency} at once",
            kind,
            partial(servers.warmed_up, concurrency, kind),
            _measures(concurrency, kind),
            "ms",
        )
        for concurrency in args.concurrency
        for kind in args.kinds
    ]
    keyed = "with a key, so that requests are metered and audited" if args.keyed else "without keys"
    method = _METHOD.format(dtype=DTYPE_NAME, mode=args.mode, keyed=keyed)
    name = f"http-{args.mode}{'-keyed' if args.keyed else ''}"
    return Plan(name, f"Over HTTP, {args.mode}", method, cases)


def _measures(concurrency: int, kind: str) -> tuple[Measure, ...]:
    target = _TARGET if concurrency == _TARGET_CONCURRENCY else None

    def rate(name: str, baseline: str, target: float | None = None) -> Measure:
        return Measure(name, lambda one: one[_VLLM] / one[baseline], target, is_floor=True)

    def time_of(moment: str) -> Measure:
        return ratio(f"{_OURS}, {moment}", f"{_VLLM}, {moment}")

    rates = (rate("requests/s, ours / vLLM's own", _OURS, target), rate("requests/s, control", _AGAIN))
    if kind == "whole":
        return (*rates, time_of("whole answer"))
    return (*rates, time_of("first token"), time_of("between tokens"))


class Servers:
    """Both servers and the client."""

    def __init__(self, mode: str, stack: contextlib.ExitStack, *, is_keyed: bool) -> None:
        """Start them."""
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        variables = {**HUGE_PAGES, "VLLM_CPU_KVCACHE_SPACE": "1", **own_folders(folder)}
        model = str(bundled_model_path())
        self._key = created_key("one", variables) if is_keyed else ""
        self._urls = {}
        for side in Side:
            command = command_of(side, model, compiled=mode == "compiled", options=_ENGINE)
            self._urls[str(side)] = stack.enter_context(served_by(side, command, variables)).url
        self._client = stack.enter_context(LoadProcess())
        self._seeds = itertools.count(step=2)

    def warmed_up(self, concurrency: int, kind: str) -> Sampler:
        """Return what runs repetitions, after one that does not count."""
        order = [_OURS, _VLLM, _AGAIN]

        def sample() -> Sample:
            sample: dict[str, float] = {}
            seed = next(self._seeds)
            for name in order:
                sample |= self._round(name, seed, concurrency, kind)
            order.reverse()
            return sample

        sample()
        return sample

    def _round(self, name: str, seed: int, concurrency: int, kind: str) -> dict[str, float]:
        is_control = name == _AGAIN
        load = Load(
            url=self._urls[_VLLM if is_control else name],
            key=self._key,  # vLLM's own server ignores it
            streams=kind == "streamed",
            concurrency=concurrency,
            num_requests=max(4, 3 * concurrency),
            prompt_tokens=32,
            min_tokens=16,
            max_tokens=48,
            seed=seed + is_control,  # other prompts, which are not in the prefix cache
        )
        outcome = self._client.send(load)
        first = f"{name}, {'first token' if load.streams else 'whole answer'}"
        sample = {name: outcome.request_s, first: statistics.median(outcome.first_s)}
        if load.streams:
            sample[f"{name}, between tokens"] = statistics.median(outcome.gaps_s)
        return sample
