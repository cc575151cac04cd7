"""How long one tenant waits for a first token while another floods the server.

The server as it is started, with a key for each of two tenants. One sends small requests now and then; the
other keeps 64 running. Compared are the first one's times to the first token with the flood and without, and
the flood's throughput with the other one there and without, with shares (``fair_window_s``) and without.
``vllm bench serve`` is the client of both.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Final

from benchmarks.case import Case, Measure, Plan, Sample, ratio
from benchmarks.clients.http_load import Load, LoadProcess
from benchmarks.precision import DTYPE_NAME
from benchmarks.servers import MODEL_NAME, created_key, own_folders, served
from nnsight_engine.modeling.bundled import bundled_model_path

_TARGET: Final = 1.5
_SETTLE_S: Final = 2.0
_FLOODS: Final[dict[str, dict[str, Any]]] = {
    "64 requests of 32 tokens, answers of 32 to 96": {
        "num_requests": 320, "prompt_tokens": 32, "min_tokens": 32, "max_tokens": 96,
    },
    "64 requests of 600 tokens, answers of 8 to 32": {
        "num_requests": 192, "prompt_tokens": 600, "min_tokens": 8, "max_tokens": 32,
    },
}  # fmt: skip
_METHOD: Final = """\
SmolLM2-135M-Instruct in {dtype}, eager, served by `nnsight-engine serve` with defaults; both clients on the
same cores, in processes of their own. The tenant with few requests sends prompts of 16 tokens one after
another, 7 a second at most, as long as the flood lasts; the other one floods. "Quiet" is without a flood;
"alone" is a flood that begins when the other tenant's share has lapsed."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the option of the server."""
    parser.add_argument("--window", default="5", help="NNSIGHT_ENGINE_FAIR_WINDOW_S; 0 for no shares")


def plan(args: argparse.Namespace, stack: contextlib.ExitStack) -> Plan:
    """Start a server with shares and one without, and return the cases."""
    windows = [args.window] if args.quick or args.window == "0" else [args.window, "0"]
    cases = [
        case
        for window in windows
        for case in _cases(Tenants(window, stack, is_quick=args.quick), has_shares=window != "0")
    ]
    return Plan("fairness", "Shares of tenants", _METHOD.format(dtype=DTYPE_NAME), cases)


def _cases(tenants: Tenants, *, has_shares: bool) -> list[Case]:
    measures = (
        ratio("flooded", "quiet", _TARGET if has_shares else None),
        ratio("flooded, 9 of 10", "quiet"),
        Measure(
            "flood's tokens/s, beside / alone",
            lambda one: one["a flood's token alone"] / one["a flood's token beside"],
        ),
    )
    size, repeats = ("with shares", None) if has_shares else ("without", 1)
    return [Case(name, size, partial(tenants.warmed_up, name), measures, "ms", repeats) for name in _FLOODS]


class Tenants:
    """Two tenants of one server, each with a client."""

    def __init__(self, window_s: str, stack: contextlib.ExitStack, *, is_quick: bool) -> None:
        """Start them."""
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        variables = {**own_folders(folder), "NNSIGHT_ENGINE_FAIR_WINDOW_S": window_s}
        self._share = 4 if is_quick else 1
        options = [str(bundled_model_path()), "--max-model-len", "1024", "--served-model-name", MODEL_NAME]
        self._url = stack.enter_context(served(options, variables))
        self._keys = [created_key(tenant, variables) for tenant in ("few", "many")]
        self._few, self._many = (stack.enter_context(LoadProcess()) for _ in self._keys)
        self._threads = stack.enter_context(ThreadPoolExecutor(1))
        self._seeds = itertools.count()

    def warmed_up(self, flood: str) -> Any:
        """Return what runs repetitions against one of the floods."""
        self._first_tokens()
        return partial(self._sample, flood)

    def _sample(self, flood: str) -> Sample:
        quiet = self._first_tokens()
        running = self._threads.submit(self._flood, flood)
        time.sleep(_SETTLE_S)
        flooded = self._first_tokens_beside(running)
        time.sleep(_SETTLE_S + 5.0)  # the other tenant's share lapses
        return {
            "flooded": statistics.median(flooded),
            "quiet": statistics.median(quiet),
            "flooded, 9 of 10": statistics.quantiles(flooded, n=10)[-1],
            "a flood's token beside": running.result(),
            "a flood's token alone": self._flood(flood),
        }

    def _first_tokens_beside(self, flood: Future[float]) -> Sequence[float]:
        found: list[float] = []
        while True:
            times = self._first_tokens()
            if flood.done() and found:  # part of these were alone
                return found
            found += times

    def _first_tokens(self) -> list[float]:
        shape = {"num_requests": 10, "prompt_tokens": 16, "min_tokens": 4, "max_tokens": 4}
        return self._few.send(self._load(0, concurrency=1, rate=7.0, **shape)).first_s

    def _flood(self, name: str) -> float:
        """Return the seconds of each of a flood's tokens, of prompts and of answers."""
        shape = {**_FLOODS[name], "num_requests": _FLOODS[name]["num_requests"] // self._share}
        return 1 / self._many.send(self._load(1, concurrency=64, **shape)).tokens_per_s

    def _load(self, tenant: int, **shape: Any) -> Load:
        key, seed = self._keys[tenant], next(self._seeds)
        return Load(url=self._url, key=key, seed=seed, **shape)
