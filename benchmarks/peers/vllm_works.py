"""Requests in vLLM with our blocks, and in plain vLLM, which reads nothing: the reference of the others."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams

from benchmarks.peers.tasks import (
    ENGINE_ARGUMENTS,
    LAYER,
    NUM_TOKENS,
    SERVED,
    TASKS,
    Size,
    Works,
    prompts,
    steering_vector,
)
from nnsight_engine import save
from nnsight_engine.vllm_backend.vllm import VLLM


def our_works(_library: Any, path: Path) -> dict[Size, Works]:
    """Start the engine and return the requests, each with a block or without one."""
    model = VLLM(str(path), dispatch=True, enforce_eager=True, **ENGINE_ARGUMENTS)
    options: dict[str, Any] = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    ids, vector = prompts(), steering_vector(576)

    def idle() -> list[torch.Tensor]:
        plain = [{"prompt_token_ids": prompt} for prompt in ids]
        model.engine.generate(plain, SamplingParams(**options), use_tqdm=False)
        return []

    def read(count: int) -> list[torch.Tensor]:
        with model.trace(**options) as tracer:
            kept: list[list[torch.Tensor]] = save([[] for _ in range(count)])
            for number, prompt in enumerate(ids[:count]):
                with tracer.invoke(prompt):
                    for _ in tracer.iter[:]:
                        kept[number].append(model.layers[LAYER].output)
            for prompt in ids[count:]:
                with tracer.invoke(prompt):
                    pass
        return [torch.cat(own) for own in kept]

    def all_steered() -> list[torch.Tensor]:
        with model.trace(**options) as tracer:
            kept: list[list[torch.Tensor]] = save([[] for _ in ids])
            for number, prompt in enumerate(ids):
                with tracer.invoke(prompt):
                    for _ in tracer.iter[:]:
                        steered = model.layers[LAYER].output + vector
                        model.layers[LAYER].output = steered
                        kept[number].append(steered)
        return [torch.cat(own) for own in kept]

    one_reads, all_read = partial(read, 1), partial(read, len(ids))
    return {SERVED: {"idle": idle, "one_reads": one_reads, "all_read": all_read, "all_steered": all_steered}}


def plain_works(_library: Any, path: Path) -> dict[Size, Works]:
    """Start the engine and return the requests, for every task."""
    engine = LLM(str(path), enforce_eager=True, **ENGINE_ARGUMENTS)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    requests = [{"prompt_token_ids": ids} for ids in prompts()]

    def generated() -> list[torch.Tensor]:
        engine.generate(requests, params, use_tqdm=False)
        return []

    return {SERVED: {task.key: generated for task in TASKS["serving"]}}
