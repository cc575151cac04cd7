"""Trainings from labelled prompts: their turns and captures, and what is learned from the values.

Trainings take turns, tenants in turn; a client that disconnects ends its own. Only a few captures run at
once, so that they use a small part of the engine's batch. The logistic regression has an L2 penalty and
runs in float64; there are usually fewer samples than dimensions, so the systems that are solved have the
size of the samples. The same values give the same weights. Scores are those of held-out examples.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from starlette.requests import Request

from api_schemas.detectors import RocPoint
from api_schemas.errors import ApiError, ErrorCode
from api_schemas.operations import Capture, Where
from api_schemas.points import LayerSelection, resolve_layer
from api_schemas.training import LabelledPrompts, Prompt, TrainingProgress
from app.auth.principal import Principal
from app.catalog.rows import RESIDUAL_LEAF
from app.engine.client import EngineClient, EngineReply, JsonObject
from app.engine.request_fields import isolate_cache
from app.limits.slots import Slots
from app.limits.tenant_budget import TenantBudget
from app.settings import Settings

Scores = npt.NDArray[np.floating[Any]]

_MAX_SEPARATION: Final = 1e6


def auroc(positive: Scores, negative: Scores) -> float:
    """Return the probability that a positive number is larger than a negative one; equal ones count half."""
    differences = positive[:, None] - negative[None, :]
    return float((differences > 0).mean() + (differences == 0).mean() / 2)


def separation(held_out: tuple[Scores, Scores], all_scores: tuple[Scores, Scores]) -> float:
    """Return the distance of the held-out sides' means, in standard deviations within a side.

    Few samples are held out, so the deviation of each side is estimated from all of them.
    """
    deviation = float(np.sqrt((all_scores[0].var() + all_scores[1].var()) / 2))
    distance = float(held_out[0].mean() - held_out[1].mean())
    bound = _MAX_SEPARATION * deviation
    return distance / deviation if abs(distance) < bound else float(np.sign(distance)) * _MAX_SEPARATION


def roc(positive: npt.NDArray[np.float32], negative: npt.NDArray[np.float32]) -> list[RocPoint]:
    """Return the points of the ROC curve, one for each different number, from the highest threshold.

    A threshold lies half way to the next lower number, so that numbers a little lower than the samples count.
    """
    levels = np.unique(np.concatenate((positive, negative)))[::-1]
    halves = (levels[:-1] / 2 + levels[1:] / 2).astype(np.float32)
    # Between neighbours in float32 there is nothing.
    thresholds = np.append(np.where(halves > levels[1:], halves, levels[:-1]), levels[-1:])
    return [
        RocPoint(
            threshold=level, tpr=float((positive >= level).mean()), fpr=float((negative >= level).mean())
        )
        for level in map(float, thresholds)
    ]


def best_cut(cuts: list[RocPoint]) -> RocPoint:
    """Return the point with the largest difference of ``tpr`` and ``fpr``; of equal ones, the strictest."""
    return max(cuts, key=lambda cut: cut.tpr - cut.fpr)


def thinned(cuts: list[RocPoint], max_points: int, keep: RocPoint) -> list[RocPoint]:
    """Return at most ``max_points`` points, evenly spread, with both ends and ``keep``."""
    if len(cuts) <= max_points:
        return cuts
    chosen = {cuts[round(index * (len(cuts) - 1) / (max_points - 2))] for index in range(max_points - 1)}
    return sorted(chosen | {keep}, key=lambda cut: -cut.threshold)


Indices = npt.NDArray[np.int64]


class NothingToLearnError(ValueError):
    """The two sides do not differ, or their values are not finite."""


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """The indices of the samples of each side that are trained on and held out."""

    positive: Indices
    negative: Indices
    held_positive: Indices
    held_negative: Indices


def split(num_positive: int, num_negative: int, *, holdout: float, seed: int) -> Split:
    """Return a split that holds out at least one sample of each side, and trains on at least one.

    Sides of equal size are treated as pairs, which stay together: if a pair's topic were on only one side
    of the training samples, the topic could be learned instead of the contrast.
    """
    random = np.random.default_rng(seed)
    positive = random.permutation(num_positive)
    negative = positive if num_positive == num_negative else random.permutation(num_negative)

    def num_held(count: int) -> int:
        return min(max(1, round(holdout * count)), count - 1)

    held_positive, held_negative = num_held(num_positive), num_held(num_negative)
    return Split(
        np.sort(positive[held_positive:]),
        np.sort(negative[held_negative:]),
        np.sort(positive[:held_positive]),
        np.sort(negative[:held_negative]),
    )


Floats = npt.NDArray[np.float64]

LEAST: Final = 1e-9
"""The smallest standard deviation of a dimension that has an effect, relative to the largest."""
_PENALTY: Final = 0.01
"""L2 penalty on the weights, per sample; all dimensions together have variance one."""
_MAX_STEPS: Final = 100
_MAX_HALVINGS: Final = 30
_TOLERANCE: Final = 1e-9
_MAX_LOGIT: Final = 500
"""So that its exponential is finite."""
_LEAST_CURVATURE: Final = 1e-12


class Standardised:
    """Values of one layer, with mean zero; the variances of all dimensions of all layers sum to one.

    So dimensions of large variance do not dominate, and constant ones have no effect.
    """

    def __init__(self, values: npt.NDArray[Any], num_dimensions: int) -> None:
        """Standardise ``[samples, width]``; ``num_dimensions`` is the width of all layers together."""
        samples = np.asarray(values, np.float64)
        self.centre, deviation = samples.mean(axis=0), samples.std(axis=0)
        self.scale = np.maximum(deviation, LEAST * deviation.max()) * np.sqrt(num_dimensions)
        self.scaled: Floats = (samples - self.centre) / self.scale


def logistic(
    positive: Sequence[npt.NDArray[Any]], negative: Sequence[npt.NDArray[Any]]
) -> tuple[list[Floats], float]:
    """Return the weights of each layer, ``[width]``, and the bias, in logits, for ``[samples, width]``.

    Newton's method in the dual form: the weights are a combination of the samples. One layer is held in
    float64 at a time.
    """
    labels = np.concatenate((np.ones(len(positive[0])), np.zeros(len(negative[0]))))
    num_dimensions = sum(layer.shape[1] for layer in positive)

    def layers() -> Iterator[Standardised]:
        for sides in zip(positive, negative, strict=True):
            yield Standardised(np.concatenate(sides), num_dimensions)

    kernel = sum((layer.scaled @ layer.scaled.T for layer in layers()), np.zeros((len(labels), len(labels))))
    combination, bias = _newton(kernel, labels, _PENALTY * len(labels))
    weights = []
    for layer in layers():
        row = layer.scaled.T @ combination / layer.scale
        bias -= float(row @ layer.centre)
        weights.append(row)
    return weights, bias


def _newton(kernel: Floats, labels: Floats, penalty: float) -> tuple[Floats, float]:
    """Return the ``a`` and ``b`` of the least loss, by Newton's method, whose steps are halved if need be.

    It is the logistic loss of ``kernel @ a + b`` plus ``penalty / 2 * a @ kernel @ a``.
    """
    count = len(labels)
    parameters = np.zeros(count + 1)

    def loss(candidate: Floats) -> float:
        a, b = candidate[:-1], candidate[-1]
        logits = kernel @ a + b
        return float(np.logaddexp(0, logits).sum() - labels @ logits + penalty / 2 * a @ kernel @ a)

    best = loss(parameters)
    for _ in range(_MAX_STEPS):
        logits = kernel @ parameters[:-1] + parameters[-1]
        chances = 1 / (1 + np.exp(-np.clip(logits, -_MAX_LOGIT, _MAX_LOGIT)))
        curvature = np.maximum(chances * (1 - chances), _LEAST_CURVATURE)
        system = np.zeros((count + 1, count + 1))
        system[:-1, :-1] = kernel + np.diag(penalty / curvature)
        system[:-1, -1] = system[-1, :-1] = 1.0
        target = np.append(logits + (labels - chances) / curvature, 0.0)
        step = np.linalg.solve(system, target) - parameters
        size = 1.0
        for _ in range(_MAX_HALVINGS):
            if loss(parameters + size * step) <= best:
                break
            size /= 2
        parameters = parameters + size * step
        previous, best = best, loss(parameters)
        if previous - best <= _TOLERANCE * max(1.0, abs(best)):
            break
    return parameters[:-1], float(parameters[-1])


SIDES: Final = ("positive", "negative")
_IN_FLIGHT: Final = 8
_RESULT: Final = "rows"
_BUT_THE_FIRST: Final = Where(phase="prompt", range=(1, None))
"""At the first position models have outliers that dominate a mean, which would then encode the length."""

Report = Callable[[TrainingProgress], None]
Values = npt.NDArray[np.float32]


async def read_activations(
    engine: EngineClient,
    request: LabelledPrompts,
    points: Sequence[str],
    http: Request,
    caller: Principal,
    report: Report,
) -> tuple[Values, Values]:
    """Return the values of both sides' prompts at points, each ``[prompts, layers, width]``.

    ``http`` is the training's request; a few prompts run at once, and ``report`` is called after each.
    """
    # Without headers, since the request's own X-Request-Id must not be used for all prompts' requests.
    http = Request({**http.scope, "headers": []}, http.receive)
    gate, num_done = asyncio.Semaphore(_IN_FLIGHT), 0
    prompts = [
        (prompt, f"{side}.{index}")
        for side, listed in zip(SIDES, (request.positive, request.negative), strict=True)
        for index, prompt in enumerate(listed)
    ]

    async def values_of(prompt: Prompt, param: str) -> Values:
        nonlocal num_done
        async with gate:
            try:
                reply = await _capture(engine, prompt, request.position, points, http, caller)
            except ApiError as error:
                raise ApiError(error.code, f"`{param}`: {error.message}", param) from error
        num_done += 1
        report(TrainingProgress(stage="capture", done=num_done, total=len(prompts)))
        body: JsonObject = reply.body or {}
        tensors = body["choices"][0]["interventions"]["results"][_RESULT]["points"]
        return np.stack([np.frombuffer(base64.b64decode(tensors[point]["data"]), "<f4") for point in points])

    tasks = [asyncio.create_task(values_of(prompt, param)) for prompt, param in prompts]
    try:
        values = np.stack(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return values[: len(request.positive)], values[len(request.positive) :]


def _capture(
    engine: EngineClient,
    prompt: Prompt,
    position: int | str,
    points: Sequence[str],
    http: Request,
    caller: Principal,
) -> Coroutine[Any, Any, EngineReply]:
    """Ask for a prompt's values at ``position``; a text for it means their mean over all but the first."""
    where = _BUT_THE_FIRST if isinstance(position, str) else Where(positions=[position])
    reduce = "mean" if isinstance(position, str) else "last"
    capture = Capture(at=list(points), where=where, reduce=reduce, dtype="float32", name=_RESULT)
    body: JsonObject = {"model": engine.served().names[0], "max_tokens": 1, "temperature": 0}
    isolate_cache(body, caller)
    if isinstance(prompt, str):
        body["prompt"] = prompt
        return engine.completions(body, (capture,), http, inline=True)
    body["messages"] = [message.model_dump(exclude_none=True) for message in prompt]
    return engine.chat(body, (capture,), http, inline=True)


ALL_LAYERS: Final = "all"
_ITEM_BYTES: Final = 4
_MAX_PROMPTS: Final = 512


@dataclasses.dataclass(frozen=True, slots=True)
class Examples:
    """The values of a training's prompts, ``[prompts, points, width]``; ``chosen`` are trained on."""

    positive: Values
    negative: Values
    chosen: Split


class TrainingQueue:
    def __init__(self, settings: Settings, engine: EngineClient) -> None:
        self._settings = settings
        self._engine = engine
        budget = TenantBudget.of(settings)
        self._slots = Slots(budget.trainings, budget.waiting_trainings)

    @property
    def num_waiting(self) -> int:
        return self._slots.num_waiting

    def check(self, request: LabelledPrompts, num_points: int, width: int) -> None:
        """Raise ApiError ``invalid_value``: too many prompts or values; ``training_failed``: duplicates."""
        num_prompts = len(request.positive) + len(request.negative)
        if num_prompts > _MAX_PROMPTS:
            raise ApiError(
                ErrorCode.INVALID_VALUE,
                f"A training has at most {_MAX_PROMPTS} prompts, got {num_prompts}.",
                "positive",
            )
        _check_different(request)
        num_bytes = num_prompts * num_points * width * _ITEM_BYTES
        if num_bytes > self._settings.bounds.max_training_bytes:
            raise ApiError(
                ErrorCode.INVALID_VALUE,
                f"A training has at most {self._settings.bounds.max_training_bytes} bytes of values, and "
                f"these prompts and layers have {num_bytes}; name fewer of one of them.",
                "layers",
            )

    @contextlib.asynccontextmanager
    async def examples(
        self,
        request: LabelledPrompts,
        points: Sequence[str],
        http: Request,
        caller: Principal,
        report: Report,
    ) -> AsyncIterator[Examples]:
        """Wait for a training's turn, and hold it while its examples are used; raises ApiError."""
        async with self._slots.request(caller.tenant):
            positive, negative = await read_activations(self._engine, request, points, http, caller, report)
            chosen = split(len(positive), len(negative), holdout=request.holdout, seed=request.seed)
            yield Examples(positive, negative, chosen)


def points_at(layers: Sequence[int]) -> list[str]:
    """Return the points of the residual stream after layers, which trainings read."""
    return [f"layers.{layer}.{RESIDUAL_LEAF}" for layer in layers]


def layers_of(selection: str | list[int], num_layers: int) -> list[int]:
    """Return the layers, ascending; raises ApiError ``unknown_layer``, ``invalid_value`` for duplicates."""
    if isinstance(selection, str):
        text = "*" if selection == ALL_LAYERS else selection
        return list(LayerSelection.parse(text, "layers").resolve(num_layers, "layers"))
    layers = [resolve_layer(layer, num_layers, f"layers.{index}") for index, layer in enumerate(selection)]
    if len(set(layers)) < len(layers):
        raise ApiError(ErrorCode.INVALID_VALUE, "A layer may be named once.", "layers")
    return sorted(layers)


def _check_different(request: LabelledPrompts) -> None:
    """Refuse duplicate prompts: one that is both trained on and held out would make the scores too good."""
    param_by_text: dict[str, str] = {}
    for side, prompts in zip(SIDES, (request.positive, request.negative), strict=True):
        for index, prompt in enumerate(prompts):
            param = f"{side}.{index}"
            text = (
                prompt
                if isinstance(prompt, str)
                else json.dumps([message.model_dump() for message in prompt])
            )
            first_param = param_by_text.setdefault(text, param)
            if first_param != param:
                raise ApiError(
                    ErrorCode.TRAINING_FAILED,
                    f"Each prompt may be there once; `{param}` is the same as `{first_param}`.",
                    param,
                )
