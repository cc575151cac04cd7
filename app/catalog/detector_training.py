"""Training detectors, in a thread; a training that fails stores nothing, and none stores its prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from starlette.requests import Request

from api_schemas.detectors import MAX_PARTS, Detector, DetectorTraining, LayerAuroc
from api_schemas.errors import ApiError, ErrorCode
from api_schemas.training import BEST_LAYER, DetectorTrainingRequest, TrainingProgress
from app.auth.principal import Principal
from app.catalog.catalog import check_sharing
from app.catalog.detector_files import check_bytes, new_version
from app.catalog.detector_fitting import FittedDetector, Recipe, fit
from app.catalog.detector_parts import invalid, point_of
from app.catalog.detectors import Detectors
from app.catalog.training import (
    ALL_LAYERS,
    Examples,
    NothingToLearnError,
    Report,
    TrainingQueue,
    layers_of,
    points_at,
)
from nnsight_engine.core.detector import Form


async def train_detector(
    queue: TrainingQueue,
    detectors: Detectors,
    wanted: DetectorTrainingRequest,
    http: Request,
    caller: Principal,
    report: Report,
) -> Detector:
    """Raise ApiError for an invalid request or prompt, ``queue_full``, ``training_failed``."""
    check_sharing(caller, shared=wanted.shared)
    spec = detectors.spec
    is_best = wanted.layers == BEST_LAYER
    layers = layers_of(ALL_LAYERS if is_best else wanted.layers, spec.num_layers)
    if not is_best and len(layers) > MAX_PARTS:
        raise invalid(f"A detector has at most {MAX_PARTS} parts, and this has {len(layers)}.", "layers")
    points = points_at(layers)
    _, width = point_of(points[0], spec, "layers")
    queue.check(wanted, len(layers), width)
    num_rows = wanted.hidden if wanted.kind == Form.MLP.value else 2
    num_parts = 1 if is_best else len(layers)
    check_bytes(4 * num_parts * num_rows * width, detectors.max_bytes, "layers")
    recipe = Recipe(Form(wanted.kind), wanted.hidden, wanted.seed)
    # Groups of points, of each of which a detector is fitted.
    groups = [range(one, one + 1) for one in range(len(layers))] if is_best else [range(len(layers))]
    fitted: dict[int, FittedDetector] = {}
    failed: dict[int, NothingToLearnError] = {}
    async with queue.examples(wanted, points, http, caller, report) as examples:
        for index, group in enumerate(groups):
            try:
                fitted[index] = await asyncio.to_thread(_fit, examples, points, group, recipe)
            except NothingToLearnError as error:
                failed[index] = error
            report(TrainingProgress(stage="fit", done=index + 1, total=len(groups)))
    if not fitted:
        raise _nothing(layers, failed)
    best = max(fitted, key=lambda index: (fitted[index].auroc, fitted[index].separation))
    tried = [LayerAuroc(layer=layers[index], auroc=each.auroc) for index, each in fitted.items()]
    training = _report(wanted, examples, [layers[index] for index in groups[best]], fitted[best])
    new = await asyncio.to_thread(
        new_version,
        fitted[best].detector,
        fitted[best].cuts,
        wanted.name,
        "trained",
        shared=wanted.shared,
        training=training.model_copy(update={"tried": tried if is_best else None}),
    )
    return await detectors.add(new, caller)


def _fit(examples: Examples, points: Sequence[str], group: range, recipe: Recipe) -> FittedDetector:
    part = slice(group.start, group.stop)
    positive, negative = examples.positive[:, part], examples.negative[:, part]
    return fit(positive, negative, points[part], examples.chosen, recipe)


def _nothing(layers: Sequence[int], failed: dict[int, NothingToLearnError]) -> ApiError:
    first = next(iter(failed.values()))
    where = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]} to {layers[-1]}"
    return ApiError(
        ErrorCode.TRAINING_FAILED,
        f"Nothing can be learned at {where}: {first}. Give prompts that differ where they are read, see "
        "`position`, or other layers.",
        "positive",
    )


def _report(
    wanted: DetectorTrainingRequest, examples: Examples, layers: list[int], fitted: FittedDetector
) -> DetectorTraining:
    chosen = examples.chosen
    return DetectorTraining(
        kind=wanted.kind,
        hidden=wanted.hidden if wanted.kind == Form.MLP.value else None,
        position=wanted.position,
        holdout=wanted.holdout,
        seed=wanted.seed,
        num_positive=len(chosen.positive),
        num_negative=len(chosen.negative),
        num_held_positive=len(chosen.held_positive),
        num_held_negative=len(chosen.held_negative),
        layers=layers,
        auroc=fitted.auroc,
    )
