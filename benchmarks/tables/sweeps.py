"""A sweep compared with the same cells as single requests, one by one, on one server.

Patches of the bundled model at 30 layers × 12 positions: one `POST /v1/sweeps`, and for the other side a
`capture` of the clean prompt and a `POST /v1/completions` for each cell. Both sides must give the same
numbers. No prompt is sent twice, so that nothing is in the prefix cache.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import itertools
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import httpx
import numpy as np

from benchmarks.case import BenchmarkCase, Plan, Sample, Sampler, ratio
from benchmarks.servers import ServerKind, command_of, own_folders, running
from benchmarks.turns import by_turns
from nnsight_engine.modeling.bundled import bundled_model_path

_SWEEP, _SINGLE = "one sweep", "single requests"
_TARGET: Final = 5.0
_NUM_LAYERS, _NUM_POSITIONS = 30, 12
_QUICK: Final = (4, 3)
_TOKEN: Final = 1000
_ATOL: Final = 1e-2
"""Batches round differently, in bfloat16 visibly."""
_TIMEOUT_S: Final = 600.0


def plan(args: argparse.Namespace, stack: contextlib.ExitStack) -> Plan:
    """Start the server, and return the case."""
    variables = {"VLLM_CPU_KVCACHE_SPACE": "1", **own_folders(stack.enter_context(_folder()))}
    options = ("--max-model-len", "1024")
    command = command_of(ServerKind.OURS, str(bundled_model_path()), compiled=False, options=options)
    url = stack.enter_context(running(command, variables)).url
    client = stack.enter_context(httpx.Client(base_url=url, timeout=_TIMEOUT_S))
    num_layers, num_positions = _QUICK if args.quick else (_NUM_LAYERS, _NUM_POSITIONS)
    size = f"{num_layers} layers × {num_positions} positions"
    make = partial(_sampler, client, num_layers, num_positions)
    measures = (ratio(_SINGLE, _SWEEP, None if args.quick else _TARGET, is_floor=True),)
    return Plan([BenchmarkCase("patching", size, make, measures, "ms")])


def _folder() -> contextlib.AbstractContextManager[str]:
    return tempfile.TemporaryDirectory()


def _sampler(client: httpx.Client, num_layers: int, num_positions: int) -> Sampler:
    seeds = itertools.count()
    layers = [*range(num_layers)]

    def timed(run: Callable[..., Any]) -> Sample:
        prompts = np.random.default_rng(next(seeds)).integers(100, 40_000, (2, num_positions)).tolist()
        start = time.perf_counter()
        run(client, layers, *prompts)
        return {"": time.perf_counter() - start}

    prompts = np.random.default_rng(2**32).integers(100, 40_000, (2, num_positions)).tolist()
    few = layers[:: max(1, num_layers // 2)]
    np.testing.assert_allclose(_sweep(client, few, *prompts), _single(client, few, *prompts), atol=_ATOL)
    sides = {_SWEEP: _sweep, _SINGLE: _single}
    return by_turns({name: partial(timed, run) for name, run in sides.items()})


def _sweep(client: httpx.Client, layers: list[int], clean: list[int], corrupted: list[int]) -> Any:
    metric = {"type": "logprob", "token": _TOKEN}
    body = {"method": "patch", "layers": layers, "positions": "all", "metric": metric}
    body |= {"prompts": [{"clean": clean, "corrupted": corrupted}]}
    found = _posted(client, "/v1/sweeps", body)["values"]
    return np.frombuffer(base64.b64decode(found["data"]), "<f4").reshape(found["shape"])


def _single(client: httpx.Client, layers: list[int], clean: list[int], corrupted: list[int]) -> Any:
    points = [f"layers.{layer}.output" for layer in layers]
    capture = {"op": "capture", "at": points, "dtype": "float32", "where": {"phase": "prompt"}, "name": "x"}
    values = _completed(client, clean, capture)["x"]["points"]
    rows = {point: np.frombuffer(base64.b64decode(one["data"]), "<f4") for point, one in values.items()}
    read = {"op": "logit_lens", "layers": [-1], "top_k": 0, "targets": [_TOKEN], "name": "x"}
    read |= {"where": {"positions": [-1]}}
    scores = []
    for point, position in itertools.product(points, range(len(clean))):
        row = rows[point].reshape(len(clean), -1)[position : position + 1]
        sent = {
            "dtype": "float32",
            "shape": list(row.shape),
            "data": base64.b64encode(row.tobytes()).decode(),
        }
        patch = {"op": "patch", "at": point, "values": sent, "where": {"positions": [position]}}
        (layer,) = _completed(client, corrupted, patch, read)["x"]["layers"].values()
        scores.append(layer[0]["targets"][0]["logprob"])
    return np.reshape(scores, (len(layers), len(clean)))


def _completed(client: httpx.Client, prompt: list[int], *operations: dict[str, Any]) -> Any:
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "interventions": operations}
    return _posted(client, "/v1/completions", body)["choices"][0]["interventions"]["results"]


def _posted(client: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    answer = client.post(path, json=body)
    answer.raise_for_status()
    return answer.json()
