"""HTTP load by ``vllm bench serve``, in a process of its own that answers each ``Load`` with its result.

The client is used as a library: its command needs a package "vllm" that the one for CPUs is not. It has no
request function for answers that are not streamed, so one is registered.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import sys
import time
from typing import Any, Final

import aiohttp
import numpy as np
from vllm.benchmarks import serve
from vllm.benchmarks.datasets import SampleRequest
from vllm.benchmarks.lib.endpoint_request_func import (
    ASYNC_REQUEST_FUNCS,
    RequestFuncInput,
    RequestFuncOutput,
)

from benchmarks.process import EventPipe, Process, events_fd
from benchmarks.servers import MODEL_NAME

_WHOLE: Final = "openai-whole"
_OK: Final = 200
_NUM_IDS: Final = 40_000
_LOWEST_TOKEN: Final = 100
"""Ids below it are special tokens."""


class LoadError(Exception):
    """An answer was not what was requested, so its time means nothing."""


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """Completions for one server, of ``min_tokens`` to ``max_tokens``.

    Attributes:
        seed: Of the prompts. The lengths of answers are the same for every seed, so that rounds compare.
        key: Bearer token, or nothing.
        rate: Requests a second, at random intervals; None sends the next one when one ends.
    """

    url: str
    concurrency: int
    num_requests: int
    prompt_tokens: int
    min_tokens: int
    max_tokens: int
    seed: int
    key: str = ""
    streams: bool = True
    rate: float | None = None

    def requests(self) -> list[SampleRequest]:
        """Return the requests, with prompts of random ids."""
        prompts, lengths = np.random.default_rng(self.seed), np.random.default_rng(0)
        return [
            SampleRequest(
                prompt=prompts.integers(_LOWEST_TOKEN, _NUM_IDS, self.prompt_tokens).tolist(),
                prompt_len=self.prompt_tokens,
                expected_output_len=int(lengths.integers(self.min_tokens, self.max_tokens + 1)),
            )
            for _ in range(self.num_requests)
        ]


@dataclasses.dataclass(frozen=True, slots=True)
class LoadOutcome:
    """How long a load took.

    Attributes:
        tokens_per_s: Tokens of prompts and answers by the time of all.
        first_s: Seconds to the first token of each request; to the whole answer where nothing is streamed.
        gaps_s: Seconds between two tokens of one answer, its mean, for each request that streams.
    """

    tokens_per_s: float
    request_s: float
    first_s: list[float]
    gaps_s: list[float]


class LoadProcess(Process):
    """The process that sends loads."""

    def __init__(self) -> None:
        """Start it."""
        super().__init__("benchmarks.clients.http_load")

    def send(self, load: Load) -> LoadOutcome:
        """Send a load and return how long it took; raises ProcessError where an answer was wrong."""
        return LoadOutcome(**self.ask(**dataclasses.asdict(load)))


async def whole_answer(
    request_func_input: RequestFuncInput, session: aiohttp.ClientSession, pbar: Any = None
) -> RequestFuncOutput:
    """Send one request that is not streamed."""
    body = {
        "model": request_func_input.model_name,
        "prompt": request_func_input.prompt,
        "max_tokens": request_func_input.output_len,
        **(request_func_input.extra_body or {}),
    }
    output = RequestFuncOutput(prompt_len=request_func_input.prompt_len, start_time=time.perf_counter())
    async with session.post(
        request_func_input.api_url, json=body, headers=request_func_input.extra_headers
    ) as response:
        text = await response.text()
        output.ttft = output.latency = time.perf_counter() - output.start_time
        output.success = response.status == _OK
        if output.success:
            output.output_tokens = json.loads(text)["usage"]["completion_tokens"]
        else:
            output.error = text
    if pbar is not None:
        pbar.update(1)
    return output


async def send(load: Load) -> LoadOutcome:
    """Send a load by vLLM's client.

    Raises:
        LoadError: An answer was not what was requested.
    """
    requests = load.requests()
    result = await serve.benchmark(
        task_type=serve.TaskType.GENERATION,
        endpoint_type="openai" if load.streams else _WHOLE,
        api_url=f"{load.url}/v1/completions",
        base_url=load.url,
        model_id=MODEL_NAME,
        model_name=MODEL_NAME,
        tokenizer=None,
        input_requests=requests,
        logprobs=None,
        request_rate=load.rate or math.inf,
        burstiness=1.0,
        disable_tqdm=True,
        num_warmups=0,
        profile=False,
        selected_percentile_metrics=[],
        selected_percentiles=[],
        ignore_eos=True,
        goodput_config_dict={},
        max_concurrency=load.concurrency,
        lora_modules=None,
        extra_headers={"Authorization": f"Bearer {load.key}"} if load.key else None,
        extra_body={"temperature": 0, "ignore_eos": True},
        ready_check_timeout_sec=0,
    )
    lengths, wanted = result["output_lens"], [request.expected_output_len for request in requests]
    if result["failed"] or lengths != wanted:
        errors = sorted({error for error in result["errors"] if error})
        raise LoadError(f"answers must have {wanted} tokens, got {lengths}: {errors[:1]}")
    return LoadOutcome(
        tokens_per_s=result["total_token_throughput"],
        request_s=result["duration"] / load.num_requests,
        first_s=result["ttfts"],
        gaps_s=[sum(own) / (num - 1) for own, num in zip(result["itls"], lengths, strict=True) if own],
    )


def main() -> None:
    """Answer until standard input ends."""
    _, fd = events_fd(sys.argv)
    EventPipe(fd).serve(lambda **load: dataclasses.asdict(asyncio.run(send(Load(**load)))))


ASYNC_REQUEST_FUNCS[_WHOLE] = whole_answer

if __name__ == "__main__":
    main()
