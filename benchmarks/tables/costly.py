"""Waiting times of one tenant beside costly requests of another.

Served by `nnsight-engine serve` of the bundled model with defaults, with a key for each of two tenants; the
clients are processes on the same cores. One tenant streams short completions and lists the models all the
time; the other one sends requests that every limit allows, once and four times at once, and gives up one
after fifteen seconds. Waits are the longest ones while they run; the bare gap is that beside the
same requests without their operations. Memory is that of all the server's processes afterwards, as a multiple
of that before.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Final

import psutil

from benchmarks.case import BenchmarkCase, Plan, Sample, Sampler, ratio, total
from benchmarks.costly_requests import CostlyClient, PlainClient, Waits, client
from benchmarks.servers import MODEL_NAME, created_key, own_folders, served
from nnsight_engine.modeling.bundled import bundled_model_path

_REQUESTS: Final = {
    "lens": "512 tokens, 30 layers, top_k 100",
    "probes": "2000 tokens, 64 probes of 30 layers",
    "choices": "n 1024, captures of 30 layers",
    "features": "2000 tokens, 26 times 64 of 60,000 top-k features changed",
    "top_features": "2000 tokens, 16 times the top 100 of 60,000 features",
    "detections": "2000 tokens, 56 times a detector of 64 MiB",
    "endless": "a block that overwrites its value for ever",
    "edges": "two operations at random, fields at their limits",
    "stored": "10 background responses of 8 MB",
    "search": "15 searches of 16 words in 60,000 labels",
}
_SETTLE_S: Final = 7.0
"""Until shares have lapsed, and memory is given back."""
_QUIET_S: Final = 5.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the choice of requests."""
    parser.add_argument("--requests", nargs="+", choices=_REQUESTS, default=list(_REQUESTS))


def plan(args: argparse.Namespace, stack: contextlib.ExitStack) -> Plan:
    """Start a server, and return the cases."""
    server = _Server(stack)
    measures = (
        total("first token, s", {"first token": 1}, target=1.0),
        total("longest gap, s", {"gap": 1}, target=1.0),
        ratio("gap", "bare gap", 2.0),
        total("/v1/models, s", {"models": 1}, target=0.3),
        ratio("memory after", "memory before", 1.1),
    )
    return Plan(
        [
            BenchmarkCase(
                f"{number} × {_REQUESTS[name]}", "", partial(server.sampler, name, number), measures, "s", 1
            )
            for name in args.requests
            for number in (1, 4)
        ]
    )


class _Server:
    """A server with two tenants, each with a client."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        variables = own_folders(folder)
        options = [str(bundled_model_path()), "--served-model-name", MODEL_NAME]
        url = stack.enter_context(served(options, variables))
        (self._process,) = psutil.Process().children()
        scopes = ("--scopes", "completions,interventions,code")
        keys = [created_key(tenant, variables, *scopes) for tenant in ("few", "many")]
        self._plain = stack.enter_context(client(PlainClient, url, keys[0]))
        self._costly = stack.enter_context(client(CostlyClient, url, keys[1]))
        self._costly.call("store")

    def sampler(self, name: str, number: int) -> Sampler:
        if number == 1:
            self._costly.call("send", name, 1)  # loads what is loaded once
        return partial(self._sample, name, number)

    def _sample(self, name: str, number: int) -> Sample:
        time.sleep(_SETTLE_S)
        before = self._memory()
        quiet = self._watched(lambda: time.sleep(_QUIET_S))
        bare = self._watched(lambda: self._costly.call("send", name, number, is_bare=True))
        time.sleep(_SETTLE_S)
        beside = self._watched(lambda: print(name, number, self._costly.call("send", name, number)))
        time.sleep(_SETTLE_S)
        return {
            "first token": beside.first_token,
            "gap": beside.gap,
            "quiet gap": quiet.gap,
            "bare gap": bare.gap,
            "models": beside.models,
            "memory before": before,
            "memory after": self._memory(),
        }

    def _watched(self, work: Callable[[], None]) -> Waits:
        self._plain.call("start")
        try:
            time.sleep(1)
            work()
        finally:
            waits: Waits = self._plain.call("stop")
        return waits

    def _memory(self) -> float:
        processes = [self._process, *self._process.children(recursive=True)]
        return float(sum(one.memory_full_info().pss for one in processes))
