"""Training from labelled prompts: what vectors and detectors share, and the training of a detector."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import BaseModel, Field

from api_schemas.detectors import Detector, Form
from api_schemas.fields import Integer, Items, Layers, Number, StoredName, Strict
from api_schemas.generation import ChatMessage

Prompt = Annotated[str, Field(strict=True, min_length=1)] | Annotated[list[ChatMessage], Field(min_length=1)]
"""A text, or the messages of a chat."""


class LabelledPrompts(Strict):
    """The data of a training, and how it is read.

    Attributes:
        name: The name under which the result is stored.
        positive: Prompts of one side.
        negative: Prompts of the other side.
        position: The position of each prompt that is read; ``mean``: the mean of all but the first.
        holdout: The fraction of each side's prompts that is held out, for scoring.
        seed: The random seed, by which the held-out prompts are selected.
        shared: Whether every tenant may use the result; for keys with the scope ``admin``.
        stream: Whether progress is sent, as server-sent events.
    """

    name: StoredName
    positive: Items[Prompt] = Field(min_length=2)
    negative: Items[Prompt] = Field(min_length=2)
    position: Integer | Literal["mean"] = -1
    holdout: Number = Field(default=0.25, gt=0, le=0.5)
    seed: Integer = Field(default=0, ge=0, lt=2**32)
    shared: bool = Field(default=False, strict=True)
    stream: bool = Field(default=False, strict=True)


class TrainingProgress(BaseModel):
    """The progress of a training.

    Attributes:
        type: Always ``progress``.
        stage: The current stage: prompts are read (``capture``) or layers fitted (``fit``).
        done: The number of completed prompts or layers.
        total: Their total number.
    """

    type: Literal["progress"] = "progress"
    stage: Literal["capture", "fit"]
    done: int
    total: int


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
