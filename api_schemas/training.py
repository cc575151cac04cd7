"""What trainings from labelled prompts have in common, of vectors and of detectors."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from api_schemas.chat import ChatMessage
from api_schemas.fields import Integer, Items, Number, Strict
from api_schemas.names import StoredName

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


__all__ = ["LabelledPrompts", "Prompt", "TrainingProgress"]
