"""Traces on a server on loopback: remote compared with local, sandboxed compared with trusted.

Table `remote`: a trace that saves one layer's last token, sent to `nnsight-engine serve`, and run by the
same engine in the client's process; a trace that saves 50 MB, and one that computes the same and saves one
number: 167 ms for 50 MB is 300 MB/s. All free memory was touched once before: where the machine is virtual,
the first use of a page waits for its host. Table `sandbox`: the small trace with a sandboxed key and with a
trusted one; and 4 plain requests of 32 tokens beside traces of one kind, one every quarter of a second:
1.031 is 0.97 of the speed. Of each repetition medians count.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

import httpx
import torch

from benchmarks.case import BenchmarkCase, Plan, Sample, Sampler, difference, ratio
from benchmarks.engine_arguments import engine_arguments
from benchmarks.machine import touch_free_memory
from benchmarks.servers import created_key, own_folders, served
from nnsight_engine import CONFIG, save
from nnsight_engine.modeling.bundled import bundled_model_path
from nnsight_engine.remote_backend.client.backend import RemoteBackend
from nnsight_engine.vllm_backend.vllm import VLLM

_OVERHEAD_TARGET_MS: Final = 5.0
_SAVED_BYTES: Final = 50_000_000
_SAVES_TARGET_MS: Final = _SAVED_BYTES / 300e6 * 1e3
"""At 300 MB/s."""
_SANDBOX_TARGET_MS: Final = 2.0
_BESIDE_TARGET: Final = 1 / 0.97
_WARMUP: Final = 20
_NUM_LARGE: Final = 5
_PAUSE_S: Final = 0.25
"""Between traces beside the batch: as many of either kind, however long each takes."""
_PLAIN: Final = {"prompt": ["I think dogs are"] * 4, "max_tokens": 32, "temperature": 0, "ignore_eos": True}
_PROMPT: Final = "The Eiffel Tower is in the city of"
_LAYER: Final = 15

Timed = Callable[[], float]
"""Does something and returns its seconds."""


def plan(args: argparse.Namespace, stack: contextlib.ExitStack) -> Plan:
    """Start the server and return the case."""
    CONFIG.APP.REMOTE_LOGGING = False
    variables = own_folders(stack.enter_context(tempfile.TemporaryDirectory()))
    keys = {}
    if args.table == "sandbox":
        for tier in ("sandboxed", "trusted"):
            keys[tier] = created_key(tier, variables, "--tier", tier, "--scopes", "completions,code")
    elif not args.quick:
        touch_free_memory()
    url = stack.enter_context(served([str(bundled_model_path()), "--max-model-len", "1024"], variables))
    count = 10 if args.quick else 30
    return Plan([_sandbox_case(url, keys, count) if keys else _remote_case(url, count)])


def _trace(model: VLLM, backend: RemoteBackend | None = None) -> None:
    """Save one layer's last token."""
    with model.trace(_PROMPT, max_tokens=1, temperature=0, backend=backend):
        hidden = save(model.layers[_LAYER].output[-1])
    assert hidden.shape[-1] > 1  # noqa: S101 - a benchmark of nothing would be fast


def _trace_numbers(model: VLLM, first: int) -> None:
    """Compute numbers of ``_SAVED_BYTES``, and save them from the first one on."""
    num_numbers = _SAVED_BYTES // 4
    with model.trace(_PROMPT, max_tokens=1, temperature=0):
        numbers = torch.ones(num_numbers)
        numbers = save(numbers[first:].clone() if first else numbers)
    assert len(numbers) == len(range(num_numbers)[first:])  # noqa: S101 - as above


def _seconds(function: Callable[..., object], *arguments: Any) -> float:
    start = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - start


def _medians(turns: Sequence[tuple[str, Timed]]) -> Sample:
    """Run turns one after the other and return the median seconds of each side."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for name, timed in turns:
        seconds[name].append(timed())
    return {name: statistics.median(own) for name, own in seconds.items()}


def _warmed_up(turns: Sequence[tuple[str, Timed]], sampler: Sampler) -> Sampler:
    _medians(turns)
    return sampler


def _remote_case(url: str, count: int) -> BenchmarkCase:
    model = str(bundled_model_path())
    client = VLLM(model, remote=url)
    local = VLLM(model, dispatch=True, **engine_arguments(eager=True, max_num_seqs=8))
    small = [
        ("remote", partial(_seconds, _trace, client)),
        ("local", partial(_seconds, _trace, local)),
    ]
    large = [
        ("50 MB saved", partial(_seconds, _trace_numbers, client, 0)),
        ("not saved", partial(_seconds, _trace_numbers, client, -1)),
    ]
    measures = (
        difference("remote", "local", "ms", _OVERHEAD_TARGET_MS),
        difference("50 MB saved", "not saved", "ms", _SAVES_TARGET_MS),
    )

    def sample() -> Sample:
        return {**_medians(small * count), **_medians(large * _NUM_LARGE)}

    name = "a trace that saves one layer's last token; one that saves 50 MB"
    return BenchmarkCase(
        name, "8 tokens", partial(_warmed_up, small * _WARMUP + large, sample), measures, "ms"
    )


def _sandbox_case(url: str, keys: dict[str, str], count: int) -> BenchmarkCase:
    client = VLLM(str(bundled_model_path()), remote=url)
    traces = {
        tier: partial(_seconds, _trace, client, RemoteBackend(url, key=key)) for tier, key in keys.items()
    }
    headers = {"Authorization": f"Bearer {keys['trusted']}"}
    body: dict[str, Any] = {**_PLAIN, "model": str(bundled_model_path())}

    def batch_beside(trace: Timed) -> float:
        """Return the seconds of a plain batch beside traces that come at a steady rate."""
        ended = threading.Event()

        def beside() -> None:
            while not ended.wait(_PAUSE_S):
                trace()

        with ThreadPoolExecutor(1) as threads:
            running = threads.submit(beside)
            start = time.perf_counter()
            try:
                answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=600)
                seconds = time.perf_counter() - start
            finally:
                ended.set()
            running.result()
        answer.raise_for_status()
        return seconds

    def sample() -> Sample:
        # Mirrored, so that a machine that becomes slower, or faster, does so for both.
        small = [*traces.items(), *reversed(traces.items())]
        beside = [(f"batch beside {tier}", partial(batch_beside, trace)) for tier, trace in small]
        return {**_medians(small * (count // 2)), **_medians(beside)}

    measures = (
        difference("sandboxed", "trusted", "ms", _SANDBOX_TARGET_MS),
        ratio("batch beside sandboxed", "batch beside trusted", _BESIDE_TARGET),
    )
    name = "a trace that saves one layer's last token; a plain batch beside such traces"
    make = partial(_warmed_up, [*traces.items()] * _WARMUP, sample)
    return BenchmarkCase(name, "8 tokens", make, measures, "ms")
