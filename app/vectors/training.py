"""Training vectors from captures of contrasting prompts: a row for each layer, with its scores.

Each prompt is one request with a capture of every layer. Only a few run at once, so that a training uses a
small part of the engine's batch. Rows are fitted in a thread, layer by layer. One training runs at a time,
and tenants take turns; a client that disconnects ends its training. A training that fails stores nothing.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from starlette.requests import Request

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.operations import Capture
from api_schemas.points import LayerSelection, resolve_layer
from api_schemas.vectors import LayerScore, Prompt, Training, TrainingEvent, TrainingRequest, Vector
from api_schemas.where import Where
from app.admission.slot_pool import SlotPool
from app.auth.principal import Principal
from app.engine.cache_salts import isolate_cache
from app.engine.client import EngineClient, EngineReply, JsonObject
from app.errors import DONE_FRAME
from app.settings import Settings
from app.storage.vector_rows import VectorRows
from app.tenant_budget import TenantBudget
from app.vectors.fitting import Fitted, NothingToLearnError, Split, fit, split
from app.vectors.rows import RESIDUAL_LEAF
from app.vectors.service import VectorService, check_sharing

_IN_FLIGHT: Final = 8
_ALL_LAYERS: Final = "all"
_RESULT: Final = "rows"
_ITEM_BYTES: Final = 4
_BUT_THE_FIRST: Final = Where(phase="prompt", range=(1, None))
"""At the first position models have outliers that dominate a mean, which would then encode the length."""
_SIDES: Final = ("positive", "negative")

Report = Callable[[TrainingEvent], None]
Values = npt.NDArray[np.float32]


class Trainer:
    """Trains the vectors of one server.

    Args:
        settings: The server's.
        engine: Runs the prompts.
        vectors: Stores the results.
    """

    def __init__(self, settings: Settings, engine: EngineClient, vectors: VectorService) -> None:
        self._settings = settings
        self._engine = engine
        self._vectors = vectors
        budget = TenantBudget.of(settings)
        self._slots = SlotPool(budget.trainings, budget.waiting_trainings)

    @property
    def num_waiting(self) -> int:
        """The number of trainings that wait for their turn."""
        return self._slots.num_waiting

    async def train(
        self, wanted: TrainingRequest, http: Request, caller: Principal, report: Report
    ) -> Vector:
        """Train a vector and store it.

        Args:
            wanted: The prompts and options.
            http: The request, its body already read.
            caller: The vector's owner.
            report: Called with progress events.

        Raises:
            ApiError: The request is invalid, ``queue_full``, ``training_failed``, or a prompt was refused.
        """
        check_sharing(caller, shared=wanted.shared)
        layers = self._check(wanted)
        async with self._slots.request(caller.tenant, object()):
            reader = _ActivationReader(self._engine, wanted, layers, http, caller)
            positive, negative = await reader.read(report)
            chosen = split(
                len(positive),
                len(negative),
                holdout=wanted.holdout,
                seed=wanted.seed,
            )
            fitted: dict[int, Fitted] = {}
            for index, layer in enumerate(layers):
                sides = positive[:, index], negative[:, index]
                fitted[layer] = await asyncio.to_thread(_fit, *sides, chosen, wanted, layer)
                report(TrainingEvent(type="progress", stage="fit", done=index + 1, total=len(layers)))
        rows = VectorRows(RESIDUAL_LEAF, tuple(layers), np.stack([one.row for one in fitted.values()]))
        return await self._vectors.keep(
            rows,
            caller,
            name=wanted.name,
            shared=wanted.shared,
            format_="trained",
            training=_report(wanted, chosen, fitted),
        )

    def _check(self, wanted: TrainingRequest) -> list[int]:
        """Validate a request and return its layers."""
        num_prompts = len(wanted.positive) + len(wanted.negative)
        if num_prompts > self._settings.max_training_prompts:
            raise ApiError(
                ErrorCode.INVALID_VALUE,
                f"A vector is trained from at most {self._settings.max_training_prompts} prompts, got "
                f"{num_prompts} (NNSIGHT_ENGINE_MAX_TRAINING_PROMPTS).",
                "positive",
            )
        _check_different(wanted)
        shape = self._vectors.shape
        layers = _layers(wanted.layers, shape.num_layers)
        num_bytes = num_prompts * len(layers) * shape.width(RESIDUAL_LEAF, "layers") * _ITEM_BYTES
        if num_bytes > self._settings.max_training_bytes:
            raise ApiError(
                ErrorCode.INVALID_VALUE,
                f"A vector is trained from at most {self._settings.max_training_bytes} bytes of values, and "
                f"these prompts and layers have {num_bytes}; name fewer of one of them "
                "(NNSIGHT_ENGINE_MAX_TRAINING_BYTES).",
                "layers",
            )
        return layers


class _ActivationReader:
    """Captures the activations of one training's prompts."""

    def __init__(
        self,
        engine: EngineClient,
        wanted: TrainingRequest,
        layers: Sequence[int],
        http: Request,
        caller: Principal,
    ) -> None:
        self._engine = engine
        self._wanted = wanted
        self._points = [f"layers.{layer}.{RESIDUAL_LEAF}" for layer in layers]
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
            report(TrainingEvent(type="progress", stage="capture", done=num_done, total=total))
            return values

        prompts = [
            (prompt, f"{side}.{index}")
            for side, listed in zip(_SIDES, (self._wanted.positive, self._wanted.negative), strict=True)
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


async def training_events(
    train: Callable[[Report], Coroutine[Any, Any, Vector]],
) -> AsyncGenerator[str, None]:
    """Yield a training as server-sent events: progress, then the vector.

    Closing the generator early cancels the training.
    """
    events: asyncio.Queue[TrainingEvent | None] = asyncio.Queue()
    working = asyncio.create_task(train(events.put_nowait))
    working.add_done_callback(lambda _: events.put_nowait(None))
    try:
        while (event := await events.get()) is not None:
            yield _frame(event)
        yield _frame(TrainingEvent(type="vector", vector=await working))
        yield DONE_FRAME
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


def _frame(event: TrainingEvent) -> str:
    return f"data: {event.model_dump_json(exclude_none=True)}\n\n"


def _layers(wanted: str | list[int], num_layers: int) -> list[int]:
    if isinstance(wanted, str):
        text = "*" if wanted == _ALL_LAYERS else wanted
        return list(LayerSelection.parse(text, "layers").resolve(num_layers, "layers"))
    layers = [resolve_layer(layer, num_layers, f"layers.{index}") for index, layer in enumerate(wanted)]
    if len(set(layers)) < len(layers):
        raise ApiError(ErrorCode.INVALID_VALUE, "A layer may be named once.", "layers")
    return sorted(layers)


def _check_different(wanted: TrainingRequest) -> None:
    """Refuse duplicate prompts: one that is both trained on and held out would make the scores too good."""
    seen: dict[str, str] = {}
    for side, prompts in zip(_SIDES, (wanted.positive, wanted.negative), strict=True):
        for index, prompt in enumerate(prompts):
            param = f"{side}.{index}"
            text = prompt if isinstance(prompt, str) else json.dumps([one.model_dump() for one in prompt])
            first = seen.setdefault(text, param)
            if first != param:
                raise ApiError(
                    ErrorCode.TRAINING_FAILED,
                    f"Each prompt may be there once; `{param}` is the same as `{first}`.",
                    param,
                )


def _fit(positive: Values, negative: Values, chosen: Split, wanted: TrainingRequest, layer: int) -> Fitted:
    try:
        return fit(positive, negative, chosen, wanted.method)
    except NothingToLearnError as error:
        raise ApiError(
            ErrorCode.TRAINING_FAILED,
            f"Nothing can be learned at layer {layer}: {error}. Give prompts that differ where they are "
            "read, see `position`, or leave the layer out.",
            "positive",
        ) from error


def _report(wanted: TrainingRequest, chosen: Split, fitted: dict[int, Fitted]) -> Training:
    def merit(layer: int) -> tuple[float, float, float]:
        one = fitted[layer]
        return one.auroc, one.accuracy, one.separation

    return Training(
        method=wanted.method,
        position=wanted.position,
        holdout=wanted.holdout,
        seed=wanted.seed,
        num_positive=len(chosen.positive),
        num_negative=len(chosen.negative),
        num_held_out=len(chosen.held_positive) + len(chosen.held_negative),
        best_layer=max(fitted, key=merit),
        layers=[
            LayerScore(
                layer=layer,
                auroc=one.auroc,
                accuracy=one.accuracy,
                separation=one.separation,
                bias=one.bias,
                norm=one.norm,
            )
            for layer, one in fitted.items()
        ],
    )


__all__ = ["Trainer", "training_events"]
