"""Training vectors, layer by layer in a thread; a training that fails stores nothing."""

from __future__ import annotations

import asyncio

import numpy as np
from starlette.requests import Request

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.training import TrainingProgress
from api_schemas.vectors import LayerScore, Training, TrainingRequest, Vector
from app.auth.principal import Principal
from app.storage.vector_rows import VectorRows
from app.training.activations import Report, Values
from app.training.queue import TrainingQueue, layers_of
from app.training.split import NothingToLearnError, Split
from app.vectors.fitting import Fitted, fit
from app.vectors.rows import RESIDUAL_LEAF
from app.vectors.service import VectorService
from app.version_service import check_sharing


class Trainer:
    def __init__(self, queue: TrainingQueue, vectors: VectorService) -> None:
        self._queue = queue
        self._vectors = vectors

    async def train(
        self, wanted: TrainingRequest, http: Request, caller: Principal, report: Report
    ) -> Vector:
        """Raise ApiError for an invalid request or prompt, ``queue_full``, ``training_failed``."""
        check_sharing(caller, shared=wanted.shared)
        shape = self._vectors.shape
        layers = layers_of(wanted.layers, shape.num_layers)
        self._queue.check(wanted, len(layers), shape.width(RESIDUAL_LEAF, "layers"))
        points = [f"layers.{layer}.{RESIDUAL_LEAF}" for layer in layers]
        fitted: dict[int, Fitted] = {}
        async with self._queue.examples(wanted, points, http, caller, report) as examples:
            chosen = examples.chosen
            for index, layer in enumerate(layers):
                sides = examples.positive[:, index], examples.negative[:, index]
                fitted[layer] = await asyncio.to_thread(_fit, *sides, chosen, wanted, layer)
                report(TrainingProgress(stage="fit", done=index + 1, total=len(layers)))
        rows = VectorRows(RESIDUAL_LEAF, tuple(layers), np.stack([one.row for one in fitted.values()]))
        return await self._vectors.keep(
            rows,
            caller,
            name=wanted.name,
            shared=wanted.shared,
            format_="trained",
            training=_report(wanted, chosen, fitted),
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


__all__ = ["Trainer"]
