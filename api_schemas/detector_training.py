"""The training of a detector: the request, and the events of a stream."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import BaseModel, Field

from api_schemas.detectors import Detector, Form
from api_schemas.fields import Integer, Layers
from api_schemas.training import LabelledPrompts

BEST_LAYER: Final = "best"
MAX_TRAINED_HIDDEN: Final = 512


class DetectorTrainingRequest(LabelledPrompts):
    """The training data of a detector, and its kind.

    Attributes:
        kind: ``linear``: a logistic regression; ``mlp``: a network with one hidden layer; ``distance``: the
            distance to the mean of the positive side, in standard deviations.
        hidden: The number of hidden units of each part, of ``mlp``.
        layers: Layers after which to read the residual stream, whose parts are summed; ``best``: the one
            that separates the held-out prompts best.
    """

    kind: Form = "linear"
    hidden: Integer = Field(default=64, ge=1, le=MAX_TRAINED_HIDDEN)
    layers: Layers = BEST_LAYER


class DetectorTrainingEvent(BaseModel):
    """An event of a training: its progress, or the resulting detector.

    Attributes:
        type: ``progress`` or ``detector``.
        stage: The current stage: prompts are read (``capture``) or layers fitted (``fit``).
        done: The number of completed prompts or layers.
        total: Their total number.
        detector: The detector; null while the training runs.
    """

    type: Literal["progress", "detector"]
    stage: Literal["capture", "fit"] | None = None
    done: int | None = None
    total: int | None = None
    detector: Detector | None = None


__all__ = ["BEST_LAYER", "DetectorTrainingEvent", "DetectorTrainingRequest"]
