"""Captures of a training's prompts: the residual stream after some layers, at one position of each prompt.

Only a few run at once, so that a training uses a small part of the engine's batch.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from starlette.requests import Request

from api_schemas.errors import ApiError
from api_schemas.operations import Capture
from api_schemas.training import LabelledPrompts, Prompt, TrainingProgress
from api_schemas.where import Where
from app.auth.principal import Principal
from app.engine.cache_salts import isolate_cache
from app.engine.client import EngineClient, EngineReply, JsonObject

SIDES: Final = ("positive", "negative")
_IN_FLIGHT: Final = 8
_RESULT: Final = "rows"
_BUT_THE_FIRST: Final = Where(phase="prompt", range=(1, None))
"""At the first position models have outliers that dominate a mean, which would then encode the length."""

Report = Callable[[TrainingProgress], None]
Values = npt.NDArray[np.float32]


class ActivationReader:
    def __init__(
        self,
        engine: EngineClient,
        wanted: LabelledPrompts,
        points: Sequence[str],
        http: Request,
        caller: Principal,
    ) -> None:
        self._engine = engine
        self._wanted = wanted
        self._points = list(points)
        # Without headers, since the request's own X-Request-Id must not be used for all prompts' requests.
        self._http = Request({**http.scope, "headers": []}, http.receive)
        self._caller = caller
        self._gate = asyncio.Semaphore(_IN_FLIGHT)

    async def read(self, report: Report) -> tuple[Values, Values]:
        """Return the values of both sides, each ``[prompts, layers, width]``."""
        total = len(self._wanted.positive) + len(self._wanted.negative)
        num_done = 0

        async def one(prompt: Prompt, param: str) -> Values:
            nonlocal num_done
            async with self._gate:
                values = await self._values(prompt, param)
            num_done += 1
            report(TrainingProgress(stage="capture", done=num_done, total=total))
            return values

        prompts = [
            (prompt, f"{side}.{index}")
            for side, listed in zip(SIDES, (self._wanted.positive, self._wanted.negative), strict=True)
            for index, prompt in enumerate(listed)
        ]
        tasks = [asyncio.create_task(one(*each)) for each in prompts]
        try:
            values = np.stack(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return values[: len(self._wanted.positive)], values[len(self._wanted.positive) :]

    async def _values(self, prompt: Prompt, param: str) -> Values:
        """Return one prompt's values, ``[layers, width]``."""
        try:
            reply = await self._call(prompt)
        except ApiError as error:
            raise ApiError(error.code, f"`{param}`: {error.message}", param) from error
        body: JsonObject = reply.body or {}
        points = body["choices"][0]["interventions"]["results"][_RESULT]["points"]
        rows = [np.frombuffer(base64.b64decode(points[point]["data"]), "<f4") for point in self._points]
        return np.stack(rows)

    def _call(self, prompt: Prompt) -> Coroutine[Any, Any, EngineReply]:
        position = self._wanted.position
        where = _BUT_THE_FIRST if position == "mean" else Where(positions=[position])
        reduce = "mean" if position == "mean" else "last"
        capture = Capture(at=self._points, where=where, reduce=reduce, dtype="float32", name=_RESULT)
        body: JsonObject = {"model": self._engine.served().names[0], "max_tokens": 1, "temperature": 0}
        isolate_cache(body, self._caller)
        if isinstance(prompt, str):
            body["prompt"] = prompt
            return self._engine.completions(body, (capture,), self._http, inline=True)
        body["messages"] = [message.model_dump(exclude_none=True) for message in prompt]
        return self._engine.chat(body, (capture,), self._http, inline=True)


__all__ = ["SIDES", "ActivationReader", "Report", "Values"]
