"""The prompts of a sweep as token ids, as the engine renders them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
from starlette.requests import Request

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.generation import TokenizeMessages, TokenizePrompt, TokenizeRequest
from api_schemas.sweeps import AnySweep, PatchSweep, PerplexityMetric, SweepText
from app.engine.client import EngineClient
from app.services.sweeps.metrics import Floats

Rows = dict[str, dict[int, npt.NDArray[np.float32]]]
"""The values of a run by point and position, each ``[width]``."""


@dataclasses.dataclass(slots=True)
class SweptPrompt:
    """One prompt, and what its runs without interventions gave.

    Attributes:
        changed: The ids of the run that cells change, which is ``clean`` or ``corrupted``.
        tokens: Its texts.
        rows: What patches write: values of the other run.
        own_rows: Values of the run itself, for patches of single heads.
        unsteered: What the metric reads of it.
    """

    clean: list[int]
    corrupted: list[int] | None
    changed: list[int]
    tokens: list[str]
    rows: Rows = dataclasses.field(default_factory=dict)
    own_rows: Rows = dataclasses.field(default_factory=dict)
    unsteered: Floats | None = None


async def swept_prompt(engine: EngineClient, wanted: AnySweep, index: int, http: Request) -> SweptPrompt:
    """Raise ApiError ``invalid_value`` for two prompts that cannot be patched."""
    prompt, param = wanted.prompts[index], f"prompts.{index}"
    clean, tokens = await _tokens(engine, prompt.clean, http, f"{param}.clean")
    if prompt.corrupted is None:
        if isinstance(wanted, PatchSweep):
            message = "`patch` needs two prompts, `clean` and `corrupted`."
            raise ApiError(ErrorCode.INVALID_VALUE, message, f"{param}.corrupted")
        return SweptPrompt(clean, None, clean, tokens)
    corrupted, others = await _tokens(engine, prompt.corrupted, http, f"{param}.corrupted")
    if not isinstance(wanted, PatchSweep):
        return SweptPrompt(clean, corrupted, clean, tokens)
    if len(clean) != len(corrupted):
        raise ApiError(
            ErrorCode.INVALID_VALUE,
            "Two prompts that are patched have the same number of tokens, and these have "
            f"{len(clean)} and {len(corrupted)}; POST /v1/tokenize shows them.",
            f"{param}.corrupted",
        )
    if wanted.direction == "corrupted_to_clean":
        return SweptPrompt(clean, corrupted, clean, tokens)
    return SweptPrompt(clean, corrupted, corrupted, others)


async def continuation_of(engine: EngineClient, wanted: AnySweep, http: Request) -> list[int]:
    """Return the ids of a continuation, without those that the tokenizer puts before every text."""
    if not isinstance(wanted.metric, PerplexityMetric):
        return []
    given, param = wanted.metric.continuation, "metric.continuation"
    ids, _ = await _tokens(engine, given, http, param)
    if isinstance(given, list):
        return ids
    try:
        reply = await engine.tokenize(TokenizeRequest(TokenizePrompt(prompt="")), http)
    except ApiError:  # of tokenizers that put nothing there
        return ids
    before = [one["id"] for one in (reply.body or {})["tokens"]]
    own = ids[len(before) :] if ids[: len(before)] == before else ids
    if not own:
        message = f"`{param}` needs a token besides those that the tokenizer puts before every text."
        raise ApiError(ErrorCode.INVALID_VALUE, message, param)
    return own


async def _tokens(
    engine: EngineClient, given: SweepText, http: Request, param: str
) -> tuple[list[int], list[str]]:
    asked: Any = given
    is_chat = isinstance(given, list) and not isinstance(given[0], int)
    wanted = TokenizeMessages(messages=asked) if is_chat else TokenizePrompt(prompt=asked)
    try:
        reply = await engine.tokenize(TokenizeRequest(wanted), http)
    except ApiError as error:
        raise ApiError(error.code, f"`{param}`: {error.message}", param) from error
    tokens = (reply.body or {})["tokens"]
    if not tokens:
        raise ApiError(ErrorCode.INVALID_VALUE, f"`{param}` needs a token, and has none.", param)
    ids = asked if isinstance(given, list) and not is_chat else [one["id"] for one in tokens]
    return [*ids], [one["text"] for one in tokens]
