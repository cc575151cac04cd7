"""HTTP load by ``vllm bench serve``, in a process of its own.

Its command needs a package "vllm" that the one for CPUs is not, so its function is called. It has no request
function for answers that are not streamed, so one is registered.
"""

from __future__ import annotations

import json
import time
from typing import Any, Final, NamedTuple

import aiohttp
from vllm.benchmarks import serve
from vllm.benchmarks.lib.endpoint_request_func import (
    ASYNC_REQUEST_FUNCS,
    RequestFuncInput,
    RequestFuncOutput,
)
from vllm.utils.argparse_utils import FlexibleArgumentParser

from benchmarks.process import ChildObject
from benchmarks.servers import MODEL_NAME
from nnsight_engine.modeling.bundled import bundled_model_path

STREAMED: Final = "openai"
WHOLE: Final = "openai-whole"
"""The backend whose answers are not streamed."""

_OK: Final = 200


class LoadError(Exception):
    """An answer was not as requested, so its time means nothing."""


class LoadOutcome(NamedTuple):
    """The times of a load.

    Attributes:
        tokens_per_s: Tokens of prompts and answers by the time of all.
        first_s: Seconds to the first token of each request; to the whole answer where nothing is streamed.
        gaps_s: Mean seconds between two tokens of one answer, for each request that streams.
    """

    tokens_per_s: float
    request_s: float
    first_s: list[float]
    gaps_s: list[float]


class LoadClient:
    """The client, which a benchmark starts in a process of its own."""

    def send(self, url: str, key: str = "", backend: str = STREAMED, **options: float) -> LoadOutcome:
        """Send random prompts to a server, with options of ``vllm bench serve``, and return the times.

        Raises:
            LoadError: An answer was not as requested.
        """
        parser = FlexibleArgumentParser()
        serve.add_cli_args(parser)
        arguments = ["--backend", backend, "--base-url", url, "--model", MODEL_NAME]
        arguments += ["--served-model-name", MODEL_NAME, "--tokenizer", str(bundled_model_path())]
        arguments += ["--dataset-name", "random", "--save-detailed"]
        arguments += ["--disable-tqdm", "--ready-check-timeout-sec", "0"]
        arguments += ["--extra-body", json.dumps({"temperature": 0, "ignore_eos": True})]
        arguments += ["--header", f"Authorization=Bearer {key}"] if key else []
        for name, value in options.items():
            arguments += [f"--{name.replace('_', '-')}", str(value)]
        result = serve.main(parser.parse_args(arguments))
        lengths, wanted = result["output_lens"], options["random_output_len"]
        if result["failed"] or {*lengths} != {wanted}:
            errors = sorted({error for error in result["errors"] if error})
            raise LoadError(f"answers must have {wanted} tokens, got {lengths}: {errors[:1]}")
        return LoadOutcome(
            tokens_per_s=result["total_token_throughput"],
            request_s=result["duration"] / len(lengths),
            first_s=result["ttfts"],
            gaps_s=[sum(own) / (num - 1) for own, num in zip(result["itls"], lengths, strict=True) if own],
        )


def load_process() -> ChildObject:
    """Return a client in a process of its own."""
    return ChildObject("benchmarks.http_load:LoadClient")


async def _whole_answer(
    request_func_input: RequestFuncInput, session: aiohttp.ClientSession, pbar: Any = None
) -> RequestFuncOutput:
    """Send one request that is not streamed."""
    del pbar  # progress is not shown
    request = request_func_input
    body = {"model": request.model_name, "prompt": request.prompt, "max_tokens": request.output_len}
    body |= request.extra_body or {}
    output = RequestFuncOutput(prompt_len=request.prompt_len, start_time=time.perf_counter())
    async with session.post(request.api_url, json=body, headers=request.extra_headers) as response:
        text = await response.text()
        output.ttft = output.latency = time.perf_counter() - output.start_time
        output.success = response.status == _OK
        if output.success:
            output.output_tokens = json.loads(text)["usage"]["completion_tokens"]
        else:
            output.error = text
    return output


ASYNC_REQUEST_FUNCS[WHOLE] = _whole_answer
