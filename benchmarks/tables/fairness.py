"""The waiting time of one tenant while another floods the server.

Served by `nnsight-engine serve` with defaults, with a key for each of two tenants; both clients are processes
on the same cores. The tenant with few requests sends prompts of 16 tokens one after another, 7 a second at
most, as long as the flood lasts; the other one keeps 64 requests running. "Quiet" is without a flood; "alone"
is a flood that begins when the other tenant's share has lapsed. "Without" has no shares.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

from benchmarks.case import BenchmarkCase, Plan, Sample, Sampler, ratio
from benchmarks.http_load import LoadOutcome, load_process
from benchmarks.servers import MODEL_NAME, created_key, own_folders, served
from nnsight_engine.modeling.bundled import bundled_model_path

_TARGET: Final = 1.5
_SETTLE_S: Final = 2.0
_LAPSE_S: Final = 7.0
"""Until the share of a tenant without requests has lapsed."""
_FLOODS: Final = {
    "64 requests of 32 tokens, answers of 64": {"random_input_len": 32, "random_output_len": 64},
    "64 requests of 600 tokens, answers of 20": {"random_input_len": 600, "random_output_len": 20},
}
_FEW: Final = {"random_input_len": 16, "random_output_len": 4}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the option of the server."""
    parser.add_argument("--window", default="5", help="NNSIGHT_ENGINE_FAIR_WINDOW_S; 0 for no shares")


def plan(args: argparse.Namespace, stack: contextlib.ExitStack) -> Plan:
    """Start a server with shares and one without, and return the cases."""
    cases = []
    for window in [args.window] if args.quick or args.window == "0" else [args.window, "0"]:
        tenants, has_shares = _TwoTenants(window, stack, is_quick=args.quick), window != "0"
        measures = (
            ratio("flooded", "quiet", _TARGET if has_shares else None),
            ratio("flooded, 9 of 10", "quiet"),
            ratio("flood beside, per token", "flood alone, per token"),
        )
        size, repeats = ("with shares", None) if has_shares else ("without", 1)
        cases += [
            BenchmarkCase(name, size, partial(tenants.sampler, name), measures, "ms", repeats)
            for name in _FLOODS
        ]
    return Plan(cases)


class _TwoTenants:
    """Two tenants of one server, each with a client."""

    def __init__(self, window_s: str, stack: contextlib.ExitStack, *, is_quick: bool) -> None:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        variables = {**own_folders(folder), "NNSIGHT_ENGINE_FAIR_WINDOW_S": window_s}
        self._flood_size = 80 if is_quick else 320
        options = [str(bundled_model_path()), "--max-model-len", "1024", "--served-model-name", MODEL_NAME]
        self._url = stack.enter_context(served(options, variables))
        self._keys = [created_key(tenant, variables) for tenant in ("few", "many")]
        self._clients = [stack.enter_context(load_process()) for _ in self._keys]
        self._threads = stack.enter_context(ThreadPoolExecutor(1))
        self._seeds = itertools.count()

    def sampler(self, flood: str) -> Sampler:
        self._first_tokens()
        return partial(self._sample, flood)

    def _sample(self, flood: str) -> Sample:
        quiet = self._first_tokens()
        flooded: list[float] = []
        flooding = self._threads.submit(self._flood, flood)
        time.sleep(_SETTLE_S)
        while True:
            times = self._first_tokens()
            if flooding.done() and flooded:  # part of these were alone
                break
            flooded += times
        time.sleep(_LAPSE_S)
        return {
            "flooded": statistics.median(flooded),
            "quiet": statistics.median(quiet),
            "flooded, 9 of 10": statistics.quantiles(flooded, n=10)[-1],
            "flood beside, per token": flooding.result(),
            "flood alone, per token": self._flood(flood),
        }

    def _first_tokens(self) -> list[float]:
        return self._send(0, max_concurrency=1, request_rate=7.0, num_prompts=10, **_FEW).first_s

    def _flood(self, name: str) -> float:
        """Return the seconds of a flood for each of its tokens, of prompts and of answers."""
        sent = self._send(1, max_concurrency=64, num_prompts=self._flood_size, **_FLOODS[name])
        return 1 / sent.tokens_per_s

    def _send(self, tenant: int, **options: float) -> LoadOutcome:
        outcome: LoadOutcome = self._clients[tenant].call(
            "send", self._url, self._keys[tenant], seed=next(self._seeds), **options
        )
        return outcome
