"""Training detectors, in a thread; a training that fails stores nothing, and none stores its prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from starlette.requests import Request

from api_schemas.detectors import MAX_PARTS, Detector, DetectorTraining, LayerAuroc, RocPoint
from api_schemas.errors import ApiError, ErrorCode
from api_schemas.training import BEST_LAYER, DetectorTrainingRequest, TrainingProgress
from app.auth.principal import Principal
from app.detectors.files import check_bytes
from app.detectors.fitting import FittedDetector, Recipe, fit
from app.detectors.parts import invalid, point_of
from app.detectors.service import DetectorService
from app.training import ALL_LAYERS, Examples, NothingToLearnError, Report, TrainingQueue, layers_of
from app.vectors.rows import RESIDUAL_LEAF
from app.versions import check_sharing
from nnsight_engine.core.detector import Form


class DetectorTrainer:
    def __init__(self, queue: TrainingQueue, detectors: DetectorService) -> None:
        self._queue = queue
        self._detectors = detectors

    async def train(
        self, wanted: DetectorTrainingRequest, http: Request, caller: Principal, report: Report
    ) -> Detector:
        """Raise ApiError for an invalid request or prompt, ``queue_full``, ``training_failed``."""
        check_sharing(caller, shared=wanted.shared)
        spec = self._detectors.spec
        is_best = wanted.layers == BEST_LAYER
        layers = layers_of(ALL_LAYERS if is_best else wanted.layers, spec.num_layers)
        if not is_best and len(layers) > MAX_PARTS:
            raise invalid(f"A detector has at most {MAX_PARTS} parts, and this has {len(layers)}.", "layers")
        points = [f"layers.{layer}.{RESIDUAL_LEAF}" for layer in layers]
        _, width = point_of(points[0], spec, "layers")
        self._queue.check(wanted, len(layers), width)
        num_rows = wanted.hidden if wanted.kind == Form.MLP.value else 2
        num_parts = 1 if is_best else len(layers)
        check_bytes(4 * num_parts * num_rows * width, self._detectors.max_bytes, "layers")
        recipe = Recipe(Form(wanted.kind), wanted.hidden, wanted.seed)
        # Groups of points, of each of which a detector is fitted.
        groups = [range(one, one + 1) for one in range(len(layers))] if is_best else [range(len(layers))]
        fitted: dict[int, FittedDetector] = {}
        failed: dict[int, NothingToLearnError] = {}
        async with self._queue.examples(wanted, points, http, caller, report) as examples:
            for index, group in enumerate(groups):
                try:
                    fitted[index] = await asyncio.to_thread(_fit, examples, points, group, recipe)
                except NothingToLearnError as error:
                    failed[index] = error
                report(TrainingProgress(stage="fit", done=index + 1, total=len(groups)))
        if not fitted:
            raise _nothing(layers, failed)
        best = max(fitted, key=lambda index: (fitted[index].auroc, fitted[index].separation))
        one = fitted[best]
        tried = [LayerAuroc(layer=layers[index], auroc=each.auroc) for index, each in fitted.items()]
        training = _report(wanted, examples, [layers[index] for index in groups[best]], one)
        return await self._detectors.keep(
            one.detector,
            [RocPoint(threshold=cut.threshold, tpr=cut.tpr, fpr=cut.fpr) for cut in one.cuts],
            caller,
            name=wanted.name,
            shared=wanted.shared,
            format_="trained",
            training=training.model_copy(update={"tried": tried if is_best else None}),
        )


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
