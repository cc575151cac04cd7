"""The schemas of stored steering vectors: requests that create one, and its description.

A vector has one row of numbers for each of its layers, all at points of one kind (``layers.*.output``).
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, Field, model_validator

from api_schemas.fields import At, Layers, Listed, Page, StoredName, Strict
from api_schemas.tensors import TensorInput
from api_schemas.training import LabelledPrompts


class NewVector(Strict):
    """A vector as numbers: by layer or point, or for the points of ``at``.

    Attributes:
        name: Its name in operations; an existing name gets a new version.
        vectors: One row for each layer (``"10"``) or point (``"layers.10.output"``).
        at: The points of ``values``, all of one kind; instead of ``vectors``.
        values: ``[width]`` for all points, or ``[points, width]``.
        shared: Whether every tenant may use it; for keys with the scope ``admin``.
    """

    name: StoredName
    vectors: dict[str, TensorInput] | None = Field(default=None, min_length=1)
    at: At | None = None
    values: TensorInput | None = None
    shared: bool = Field(default=False, strict=True)

    @model_validator(mode="after")
    def _check_form(self) -> Self:
        are_given = (self.vectors is not None, self.at is not None, self.values is not None)
        if are_given not in {(True, False, False), (False, True, True)}:
            raise ValueError("a vector is given as `vectors`, or as `at` and `values`")
        return self


class VectorUpload(BaseModel):
    """A vector as a file, in the fields of a form: for documentation.

    Attributes:
        name: Its name in operations.
        file: Its content: safetensors, ``.npz``, a GGUF control vector, or JSON.
        at: The points of a file with a single tensor.
        shared: Whether every tenant may use it.
    """

    name: StoredName
    file: str = Field(json_schema_extra={"format": "binary"})
    at: str | None = None
    shared: Literal["true", "false"] = "false"


class TrainingRequest(LabelledPrompts):
    """The training data and method of a vector.

    Attributes:
        method: ``mean_difference``: from the mean of the negative prompts to that of the positive ones;
            ``pca``: the first principal direction of the differences of pairs, prompt by prompt;
            ``logistic``: the weights of a logistic probe that separates the two.
        positive: Prompts that show what the vector steers towards.
        negative: Prompts that show what it steers away from; for ``pca`` as many, in the same order.
        layers: Layers after which to read the residual stream; each gets a row.
    """

    method: Literal["mean_difference", "pca", "logistic"] = "mean_difference"
    layers: Layers = "all"

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        if self.method == "pca" and len(self.positive) != len(self.negative):
            raise ValueError(
                "`pca` takes the differences of pairs, so both sides need as many prompts; "
                f"got {len(self.positive)} and {len(self.negative)}"
            )
        return self


class LayerScore(BaseModel):
    """How well one layer's row separates the held-out prompts.

    Attributes:
        layer: The layer.
        auroc: The probability that a positive prompt lies further along the row than a negative one; 0.5 is
            chance.
        accuracy: The fraction of the prompts on the right side of ``bias``.
        separation: The distance of the two sides' means along the row, in standard deviations within a side.
        bias: The bias with which ``probe`` is positive for the positive side: minus the middle between the
            training sides, or the logistic probe's own.
        norm: The norm of the row.
    """

    layer: int
    auroc: float
    accuracy: float
    separation: float
    bias: float
    norm: float


class Training(BaseModel):
    """How a vector was trained, and how well.

    Attributes:
        method: The requested method.
        position: The requested position.
        holdout: The requested fraction of held-out prompts.
        seed: The requested random seed.
        num_positive: The number of positive prompts in the training data.
        num_negative: The number of negative prompts in the training data.
        num_held_out: The number of held-out prompts, of both sides together.
        best_layer: The layer with the best score: by ``auroc``, then ``accuracy``, then ``separation``.
        layers: The scores of all layers.
    """

    method: Literal["mean_difference", "pca", "logistic"]
    position: int | Literal["mean"]
    holdout: float
    seed: int
    num_positive: int
    num_negative: int
    num_held_out: int
    best_layer: int
    layers: list[LayerScore]


class Vector(Listed):
    """A stored vector.

    Attributes:
        id: Its id.
        object: Always ``vector``.
        name: Its name in operations.
        version: Its version; ``name@version`` always refers to this vector.
        model: The server's name of its model.
        at: The kind of its points.
        layers: The layers of its rows, ascending.
        width: The number of elements of a row.
        shared: Whether every tenant may use it.
        own: Whether it belongs to the caller's tenant.
        format: The format of its upload; ``trained`` if the server trained it.
        source_sha256: SHA-256 of the uploaded file, hexadecimal.
        sha256: SHA-256 of its numbers: rows by layer, float32, little-endian.
        bytes: The size of its numbers in bytes.
        created_at: The time of its creation, in seconds since 1970.
        training: Its training data, method and scores; null if they are not known.
        warnings: In the answer of an upload: that its file names another model than the server's, or has the
            training of other numbers.
    """

    object: Literal["vector"] = "vector"
    name: str
    version: int
    model: str
    at: str
    layers: list[int]
    width: int
    shared: bool
    own: bool
    format: Literal["safetensors", "npz", "gguf", "json", "trained"]
    source_sha256: str | None = None
    sha256: str
    bytes: int
    created_at: float
    training: Training | None = None
    warnings: list[str] = Field(default_factory=list)


class VectorList(Page[Vector]):
    """A page of vectors, the newest first, in the format of OpenAI's lists."""


class TrainingEvent(BaseModel):
    """An event of a training: its progress, or the resulting vector.

    Attributes:
        type: ``progress`` or ``vector``.
        stage: The current stage: prompts are read (``capture``) or layers fitted (``fit``).
        done: The number of completed prompts or layers.
        total: Their total number.
        vector: The vector; null while the training runs.
    """

    type: Literal["progress", "vector"]
    stage: Literal["capture", "fit"] | None = None
    done: int | None = None
    total: int | None = None
    vector: Vector | None = None
