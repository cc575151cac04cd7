"""A harvest of one layer at all positions, compared with the same prompts alone.

One engine takes the same random prompts by turns: *harvest* writes the residual stream of one layer in
float32, *plain* computes the prompts and generates one token for each, without the prefix cache.
*transformers* harvests from the same weights with hooks, in packs of the same size. Sides are tokens per
second.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from vllm import SamplingParams

from benchmarks.case import BenchmarkCase, Plan, Sample, Sampler, ratio
from benchmarks.turns import by_turns
from nnsight_engine import bundled_model_path, harvest
from nnsight_engine.modeling.language import LanguageModel
from nnsight_engine.vllm_backend.vllm import VLLM

_POINT: Final = "layers.15.output"
_STEP_TOKENS: Final = 1024
_LENGTHS: Final = (64, 256)
_OF_PLAIN: Final = 0.9
_OF_TRANSFORMERS: Final = 3.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the number of tokens of a side."""
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of one side")


def plan(args: argparse.Namespace, stack: contextlib.ExitStack) -> Plan:
    """Return the cases."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    path = str(bundled_model_path())
    engine = VLLM(
        path,
        dtype="float32",
        max_model_len=512,
        max_num_batched_tokens=_STEP_TOKENS,
        max_num_seqs=64,
        dispatch=True,
    )
    stack.callback(engine.shutdown)
    local = LanguageModel(path, dtype=torch.float32, dispatch=True)
    measures = (
        ratio("harvest", "plain", _OF_PLAIN, is_floor=True),
        ratio("harvest", "transformers", _OF_TRANSFORMERS, is_floor=True),
    )
    cases = [
        BenchmarkCase(
            f"prompts of {length} tokens",
            f"{args.tokens} tokens",
            partial(_sampler, engine, local, folder, args.tokens, length),
            measures,
            unit="tokens/s",
        )
        for length in _LENGTHS
    ]
    return Plan(cases)


def _sampler(engine: VLLM, local: LanguageModel, folder: Path, num_tokens: int, length: int) -> Sampler:
    random = np.random.default_rng(0)
    prompts = random.integers(10, 40_000, (num_tokens // length, length)).tolist()
    numbers = itertools.count()

    def harvested(model: Any) -> None:
        to = folder / str(next(numbers))
        dataset = harvest(model, prompts, to, points=[_POINT], pack_tokens=_STEP_TOKENS, show_progress=False)
        if dataset.num_rows != len(prompts) * length:
            raise RuntimeError("the harvest lacks rows")
        shutil.rmtree(to)

    def plain() -> None:
        params = [SamplingParams(max_tokens=1, temperature=0.0, detokenize=False) for _ in prompts]
        for one in params:
            one.skip_reading_prefix_cache = True
        engine.host.run([{"prompt_token_ids": ids} for ids in prompts], params)  # type: ignore[union-attr] # it is synchronous

    def rate(side: Callable[[], None]) -> Sample:
        begin = time.perf_counter()
        side()
        return {"": len(prompts) * length / (time.perf_counter() - begin)}

    sides = {
        "harvest": partial(rate, partial(harvested, engine)),
        "plain": partial(rate, plain),
        "transformers": partial(rate, partial(harvested, local)),
    }
    return by_turns(sides)
