"""The detectors of one server: from files or training, for requests to use by name.

They are trained in a thread; a training that fails stores nothing, and none stores its prompts.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from typing import Final

from starlette.requests import Request

from api_schemas.detectors import MAX_PARTS, DetectorList, DetectorTraining, LayerAuroc
from api_schemas.detectors import Detector as StoredDetector
from api_schemas.errors import ApiError, ErrorCode
from api_schemas.training import BEST_LAYER, DetectorTrainingRequest, TrainingProgress
from app.auth.principal import Principal
from app.catalog.catalog import Catalog, check_sharing
from app.catalog.detector_files import (
    DetectorForm,
    check_bytes,
    from_form,
    from_json,
    new_version,
    stored_detector,
    upload_bytes,
)
from app.catalog.detector_fitting import FittedDetector, Recipe, fit
from app.catalog.detector_parts import check_fit, invalid, point_of
from app.catalog.training import (
    ALL_LAYERS,
    Examples,
    NothingToLearnError,
    Report,
    TrainingQueue,
    layers_of,
    points_at,
)
from app.engine.served_model import spec_of
from app.storage.tables import VersionRow
from app.storage.versions import Kind
from nnsight_engine.core.detector import Detector, Form
from nnsight_engine.core.model_spec import ModelSpec

_ITEM_BYTES: Final = 4


class Detectors(Catalog[StoredDetector, Detector]):
    """Their content is a file, see ``detector_files``."""

    kind = Kind(
        "detector", "detectors", "det_", StoredDetector, DetectorList, lambda budget: budget.vector_bytes,
        counted=("vector", "detector"),
    )  # fmt: skip

    @property
    def spec(self) -> ModelSpec:
        """The served model, which detectors must fit; only when the engine is ready."""
        return spec_of(self._engine.capabilities())

    @property
    def max_bytes(self) -> int:
        return self._settings.bounds.max_tensor_bytes

    async def create(self, request: Request, caller: Principal) -> StoredDetector:
        """Store the detector of a request; raises ApiError, and stores nothing, if it is invalid."""
        model = self.spec, self.max_bytes
        new = await self._upload(
            request,
            DetectorForm,
            functools.partial(from_form, *model),
            functools.partial(from_json, *model),
            **upload_bytes(self.max_bytes, self._settings.max_body_bytes),
        )
        return await self.add(new, caller)

    def _parse(self, data: bytes) -> Detector:
        return stored_detector(data)

    def _check_fit(self, row: VersionRow, content: Detector, param: str) -> None:
        try:
            check_fit(content, self.spec)
        except ApiError as error:
            why = f"does not fit {self.models[0]!r}: {error.message.removesuffix('.')}"
            raise self.mismatch(row, why, param) from error


async def train_detector(
    queue: TrainingQueue,
    detectors: Detectors,
    request: DetectorTrainingRequest,
    http: Request,
    caller: Principal,
    report: Report,
) -> StoredDetector:
    """Train a detector when its turn has come, and store it.

    Raises ApiError for an invalid request or prompt, ``queue_full``, ``training_failed``.
    """
    check_sharing(caller, shared=request.shared)
    spec = detectors.spec
    is_best = request.layers == BEST_LAYER
    layers = layers_of(ALL_LAYERS if is_best else request.layers, spec.num_layers)
    if not is_best and len(layers) > MAX_PARTS:
        raise invalid(f"A detector has at most {MAX_PARTS} parts, and this has {len(layers)}.", "layers")
    points = points_at(layers)
    _, width = point_of(points[0], spec, "layers")
    queue.check(request, len(layers), width)
    # Rows of a part's tensors at most: hidden weights, or mean and scale.
    num_rows = request.hidden if request.kind == Form.MLP.value else 2
    num_parts = 1 if is_best else len(layers)
    check_bytes(_ITEM_BYTES * num_parts * num_rows * width, detectors.max_bytes, "layers")
    recipe = Recipe(Form(request.kind), request.hidden, request.seed)
    # Groups of points, of each of which a detector is fitted.
    groups = [range(index, index + 1) for index in range(len(layers))] if is_best else [range(len(layers))]
    fitted: dict[int, FittedDetector] = {}
    failed: dict[int, NothingToLearnError] = {}
    async with queue.examples(request, points, http, caller, report) as examples:
        for index, group in enumerate(groups):
            try:
                fitted[index] = await asyncio.to_thread(_fit, examples, points, group, recipe)
            except NothingToLearnError as error:
                failed[index] = error
            report(TrainingProgress(stage="fit", done=index + 1, total=len(groups)))
    if not fitted:
        raise _nothing_learned(layers, failed)
    best = max(fitted, key=lambda index: (fitted[index].auroc, fitted[index].separation))
    tried = [LayerAuroc(layer=layers[index], auroc=group_fit.auroc) for index, group_fit in fitted.items()]
    training = _training_report(request, examples, [layers[index] for index in groups[best]], fitted[best])
    new = await asyncio.to_thread(
        new_version,
        fitted[best].detector,
        fitted[best].cuts,
        request.name,
        "trained",
        shared=request.shared,
        training=training.model_copy(update={"tried": tried if is_best else None}),
    )
    return await detectors.add(new, caller)


def _fit(examples: Examples, points: Sequence[str], group: range, recipe: Recipe) -> FittedDetector:
    """Fit a detector to a group of points, in a thread."""
    selection = slice(group.start, group.stop)
    positive, negative = examples.positive[:, selection], examples.negative[:, selection]
    return fit(positive, negative, points[selection], examples.chosen, recipe)


def _nothing_learned(layers: Sequence[int], failed: dict[int, NothingToLearnError]) -> ApiError:
    error = next(iter(failed.values()))
    where = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]} to {layers[-1]}"
    return ApiError(
        ErrorCode.TRAINING_FAILED,
        f"Nothing can be learned at {where}: {error}. Give prompts that differ where they are read, see "
        "`position`, or other layers.",
        "positive",
    )


def _training_report(
    request: DetectorTrainingRequest, examples: Examples, layers: list[int], fitted: FittedDetector
) -> DetectorTraining:
    chosen = examples.chosen
    return DetectorTraining(
        kind=request.kind,
        hidden=request.hidden if request.kind == Form.MLP.value else None,
        position=request.position,
        holdout=request.holdout,
        seed=request.seed,
        num_positive=len(chosen.positive),
        num_negative=len(chosen.negative),
        num_held_positive=len(chosen.held_positive),
        num_held_negative=len(chosen.held_negative),
        layers=layers,
        auroc=fitted.auroc,
    )
