"""The vectors of one server: rows of numbers by layer, from files or training, used by operations.

A layer's row is fitted to values of contrasting prompts in float64, in a thread, deterministically. A
training that fails stores nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from datetime import UTC, datetime
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
import safetensors.numpy
from starlette.requests import Request

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.training import TrainingProgress
from api_schemas.vectors import LayerScore, Training, TrainingRequest, Vector, VectorList
from app.auth.principal import Principal
from app.catalog.catalog import Catalog, check_sharing
from app.catalog.rows import LAYER_PREFIX, RESIDUAL_LEAF, ModelShape, VectorRows
from app.catalog.training import (
    NothingToLearnError,
    Report,
    Split,
    TrainingQueue,
    Values,
    auroc,
    layers_of,
    logistic,
    points_at,
    separation,
)
from app.catalog.vector_files import VectorForm, from_form, from_json, upload_bytes
from app.storage.tables import VersionRow
from app.storage.versions import Kind


class Vectors(Catalog[Vector, bytes]):
    """Their content is rows, ``[layers, width]``, float32 and little-endian; ``layers`` are ascending."""

    kind = Kind(
        "vector", "vectors", "vec_", Vector, VectorList, lambda budget: budget.vector_bytes,
        counted=("vector", "detector"),
    )  # fmt: skip

    @property
    def shape(self) -> ModelShape:
        """The shape that vectors of the served model must have; only when the engine is ready."""
        return ModelShape.of(self.models[0], self._engine.capabilities())

    async def create(self, request: Request, caller: Principal, *, strict: bool = False) -> Vector:
        """Store the vector of a request, or nothing if it is invalid (ApiError).

        ``strict`` refuses a file that names another model than the served one.
        """
        shape = self.shape
        upload = await self._upload(
            request,
            VectorForm,
            functools.partial(from_form, shape),
            functools.partial(from_json, shape),
            **upload_bytes(shape),
        )
        refused = ErrorCode.VECTOR_MISMATCH if strict else None
        warnings = self._engine.served().warnings_of(upload.model, "The metadata of the file", refused)
        if upload.has_other_training:
            warnings.append("The file's training is not of its numbers, and was left out.")
        added = await self.add(upload.new, caller)
        return added.model_copy(update={"warnings": warnings})

    def _parse(self, data: bytes) -> bytes:
        return data

    def _check_fit(self, row: VersionRow, content: bytes, param: str) -> None:
        del content
        if self.shape.widths.get(row.head["at"].removeprefix(LAYER_PREFIX)) != row.head["width"]:
            raise self.mismatch(row, self._of_other_model(row), param)

    def _file(self, shown: Vector, data: bytes) -> bytes:
        """Return a safetensors file whose metadata say where its numbers come from."""
        rows = np.frombuffer(data, "<f4").reshape(len(shown.layers), shown.width)
        tensors = {
            shown.at.replace("*", str(layer)): row for layer, row in zip(shown.layers, rows, strict=True)
        }
        created = datetime.fromtimestamp(shown.created_at, UTC).isoformat(timespec="seconds")
        metadata = {
            "name": shown.name, "version": str(shown.version), "model": shown.model, "sha256": shown.sha256,
            "format": shown.format, "created_at": created,
        }  # fmt: skip
        if shown.source_sha256 is not None:
            metadata["source_sha256"] = shown.source_sha256
        if shown.training is not None:
            metadata["training"] = shown.training.model_dump_json()
        return safetensors.numpy.save(tensors, metadata)


Method = Literal["mean_difference", "pca", "logistic"]
Floats = npt.NDArray[np.float64]

_LEAST: Final = 1e-9
"""Minimum length of a row, relative to the values' own length."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fitted:
    """A layer's row and its scores, see ``api_schemas.vectors.LayerScore``."""

    row: npt.NDArray[np.float32]
    bias: float
    auroc: float
    accuracy: float
    separation: float

    @property
    def norm(self) -> float:
        return float(np.linalg.norm(self.row.astype(np.float64)))


def fit(positive: npt.ArrayLike, negative: npt.ArrayLike, chosen: Split, method: Method) -> Fitted:
    """Fit a row that tells two sides of ``[samples, width]`` apart, and score it on the held-out samples.

    Raises NothingToLearnError if the sides do not differ or are not finite.
    """
    towards, away = np.asarray(positive, np.float64), np.asarray(negative, np.float64)
    if not (np.isfinite(towards).all() and np.isfinite(away).all()):
        raise NothingToLearnError("the model's values there are not all numbers")
    trained = towards[chosen.positive], away[chosen.negative]
    size = float(np.sqrt(np.square(np.concatenate(trained)).sum(axis=1).mean()))
    difference = trained[0].mean(axis=0) - trained[1].mean(axis=0)
    if np.linalg.norm(difference) <= _LEAST * size:
        raise NothingToLearnError("the two sides do not differ there")
    vector, bias = _METHODS[method](*trained)
    row = vector.astype(np.float32)
    if not (np.isfinite(row).all() and row.any() and np.isfinite(bias)):
        raise NothingToLearnError("the difference of the two sides there is no direction in float32")
    direction = row.astype(np.float64)
    return Fitted(row, float(bias), *_scores((towards @ direction + bias, away @ direction + bias), chosen))


def _mean_difference(positive: Floats, negative: Floats) -> tuple[Floats, float]:
    vector = positive.mean(axis=0) - negative.mean(axis=0)
    return vector, _middle(vector, positive, negative)


def _pca(positive: Floats, negative: Floats) -> tuple[Floats, float]:
    """Return the first principal direction of the pairs' differences, scaled to their mean projection on it.

    The differences are not centred: their mean is the direction sought.
    """
    differences = positive - negative
    _, weights = np.linalg.eigh(differences @ differences.T)
    direction = differences.T @ weights[:, -1]
    direction /= np.linalg.norm(direction)
    vector = direction * (differences @ direction).mean()
    return vector, _middle(vector, positive, negative)


def _logistic(positive: Floats, negative: Floats) -> tuple[Floats, float]:
    (weights,), bias = logistic([positive], [negative])
    return weights, bias


_METHODS: Final = {"mean_difference": _mean_difference, "pca": _pca, "logistic": _logistic}


def _middle(vector: Floats, positive: Floats, negative: Floats) -> float:
    return -float(vector @ (positive.mean(axis=0) + negative.mean(axis=0))) / 2


def _scores(sides: tuple[Floats, Floats], chosen: Split) -> tuple[float, float, float]:
    """Return AUROC, accuracy and separation of the held-out samples; ``sides`` are all samples' scores."""
    positive, negative = sides[0][chosen.held_positive], sides[1][chosen.held_negative]
    right = int((positive > 0).sum() + (negative <= 0).sum())
    accuracy = right / (len(positive) + len(negative))
    return auroc(positive, negative), accuracy, separation((positive, negative), sides)


async def train_vector(
    queue: TrainingQueue,
    vectors: Vectors,
    request: TrainingRequest,
    http: Request,
    caller: Principal,
    report: Report,
) -> Vector:
    """Train a vector when its turn has come, and store it.

    Raises ApiError for an invalid request or prompt, ``queue_full``, ``training_failed``.
    """
    check_sharing(caller, shared=request.shared)
    shape = vectors.shape
    layers = layers_of(request.layers, shape.num_layers)
    queue.check(request, len(layers), shape.width(RESIDUAL_LEAF, "layers"))
    fitted: dict[int, Fitted] = {}
    async with queue.examples(request, points_at(layers), http, caller, report) as examples:
        chosen = examples.chosen
        for index, layer in enumerate(layers):
            sides = examples.positive[:, index], examples.negative[:, index]
            fitted[layer] = await asyncio.to_thread(_fit, *sides, chosen, request, layer)
            report(TrainingProgress(stage="fit", done=index + 1, total=len(layers)))
    rows = VectorRows(
        RESIDUAL_LEAF, tuple(layers), np.stack([layer_fit.row for layer_fit in fitted.values()])
    )
    training = _training_report(request, chosen, fitted)
    new = rows.new_version(request.name, "trained", shared=request.shared, training=training)
    return await vectors.add(new, caller)


def _fit(positive: Values, negative: Values, chosen: Split, request: TrainingRequest, layer: int) -> Fitted:
    try:
        return fit(positive, negative, chosen, request.method)
    except NothingToLearnError as error:
        raise ApiError(
            ErrorCode.TRAINING_FAILED,
            f"Nothing can be learned at layer {layer}: {error}. Give prompts that differ where they are "
            "read, see `position`, or leave the layer out.",
            "positive",
        ) from error


def _training_report(request: TrainingRequest, chosen: Split, fitted: dict[int, Fitted]) -> Training:
    def merit(layer: int) -> tuple[float, float, float]:
        layer_fit = fitted[layer]
        return layer_fit.auroc, layer_fit.accuracy, layer_fit.separation

    return Training(
        method=request.method,
        position=request.position,
        holdout=request.holdout,
        seed=request.seed,
        num_positive=len(chosen.positive),
        num_negative=len(chosen.negative),
        num_held_out=len(chosen.held_positive) + len(chosen.held_negative),
        best_layer=max(fitted, key=merit),
        layers=[
            LayerScore(
                layer=layer,
                auroc=layer_fit.auroc,
                accuracy=layer_fit.accuracy,
                separation=layer_fit.separation,
                bias=layer_fit.bias,
                norm=layer_fit.norm,
            )
            for layer, layer_fit in fitted.items()
        ],
    )
