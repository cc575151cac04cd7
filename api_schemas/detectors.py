"""The schemas of stored detectors: their names, requests that create one, and its description.

A detector computes a number for each position from the values at one or more points
(``nnsight_engine.core.detector``).
"""

from __future__ import annotations

from typing import Final, Literal

from pydantic import BaseModel, Field

from api_schemas.fields import Items, Listed, NameOrText, Number, Page, PointText, StoredName, Strict
from api_schemas.tensors import TensorInput

MAX_PARTS: Final = 64
MAX_HIDDEN: Final = 4096
"""Maximum number of hidden units of a part."""
MAX_ROC_POINTS: Final = 256

Form = Literal["linear", "mlp", "distance"]
Link = Literal["identity", "sigmoid"]


class DetectorName(NameOrText):
    """A detector stored on the server: the newest version of a name, ``refusal``, or one, ``refusal@2``.

    Also written as a plain string. With ``id`` it is the detector with this id, whichever tenant's detector
    has the name for the caller.
    """


class DetectorUsed(BaseModel):
    """The detector that a name resolved to."""

    name: str
    version: int
    id: str


class RocPoint(Strict):
    """How a detector separates held-out examples at one threshold.

    Attributes:
        threshold: Examples whose score is at least this are taken for positive.
        tpr: The fraction of the positive examples that are.
        fpr: The fraction of the negative examples that are.
    """

    threshold: Number
    tpr: Number = Field(ge=0, le=1)
    fpr: Number = Field(ge=0, le=1)


class PartHead(Strict):
    """What a detector reads at one point, without its numbers.

    Attributes:
        at: The point.
        form: ``linear``: ``x·weights``; ``mlp``: ``relu(hidden_weights·x + hidden_bias)·weights``;
            ``distance``: ``-‖(x - mean)·scale‖``.
    """

    at: PointText
    form: Form


class _Head(Strict):
    """The fields of a detector beside its parts.

    Attributes:
        bias: Added to the sum of the parts.
        link: Applied to the sum.
        threshold: The score from which it is taken to hold, where a request gives no other.
        calibration: How it separates held-out examples, by threshold.
    """

    bias: Number = 0.0
    link: Link = "identity"
    threshold: Number | None = None
    calibration: Items[RocPoint] = Field(default=[], max_length=MAX_ROC_POINTS)


class DetectorHead(_Head):
    """A detector without its numbers: the field ``head`` of a form, or the metadata ``detector`` of its file.

    Attributes:
        parts: Its parts, at different points.
    """

    parts: Items[PartHead] = Field(min_length=1, max_length=MAX_PARTS)


class NewPart(PartHead):
    """A part with its numbers.

    Attributes:
        weights: ``[width]`` of ``linear``, ``[hidden]`` of ``mlp``.
        hidden_weights: ``[hidden, width]``, of ``mlp``.
        hidden_bias: ``[hidden]``, of ``mlp``; zeros if absent.
        mean: ``[width]``, of ``distance``.
        scale: ``[width]``, of ``distance``; ones if absent.
    """

    weights: TensorInput | None = None
    hidden_weights: TensorInput | None = None
    hidden_bias: TensorInput | None = None
    mean: TensorInput | None = None
    scale: TensorInput | None = None


class NewDetector(_Head):
    """A detector as numbers.

    Attributes:
        name: Its name in requests; an existing name gets a new version.
        parts: Its parts, at different points.
        shared: Whether every tenant may use it; for keys with the scope ``admin``.
    """

    name: StoredName
    parts: Items[NewPart] = Field(min_length=1, max_length=MAX_PARTS)
    shared: bool = Field(default=False, strict=True)


class DetectorUpload(BaseModel):
    """A detector as a file, in the fields of a form: for documentation.

    Attributes:
        name: Its name in requests.
        file: Its content, safetensors: ``parts.N.weights`` and so on.
        head: A ``DetectorHead`` as JSON; absent if the file has it in its metadata.
        shared: Whether every tenant may use it.
    """

    name: StoredName
    file: str = Field(json_schema_extra={"format": "binary"})
    head: str | None = None
    shared: Literal["true", "false"] = "false"


class LayerAuroc(BaseModel):
    """How well a detector that reads one layer separates the held-out prompts.

    Attributes:
        layer: The layer.
        auroc: The probability that a positive prompt has a higher score than a negative one; 0.5 is chance.
    """

    layer: int
    auroc: float


class DetectorTraining(BaseModel):
    """How a detector was trained, and how well.

    Attributes:
        kind: The requested kind.
        hidden: The number of hidden units of each part, of ``mlp``.
        position: The requested position.
        holdout: The requested fraction of held-out prompts.
        seed: The requested random seed.
        num_positive: The number of positive prompts in the training data.
        num_negative: The number of negative prompts in the training data.
        num_held_positive: The number of positive prompts held out.
        num_held_negative: The number of negative prompts held out.
        layers: The layers that it reads.
        auroc: The probability that a held-out positive prompt has a higher score than a negative one.
        tried: Every layer among which ``best`` chose; null for layers that were given.
    """

    kind: Form
    hidden: int | None = None
    position: int | Literal["mean"]
    holdout: float
    seed: int
    num_positive: int
    num_negative: int
    num_held_positive: int
    num_held_negative: int
    layers: list[int]
    auroc: float
    tried: list[LayerAuroc] | None = None


class DetectorPart(BaseModel):
    """What a stored detector reads at one point.

    Attributes:
        at: The point.
        form: How it computes a number.
        width: The number of elements of the point's value.
        hidden: The number of hidden units, of ``mlp``.
    """

    at: str
    form: Form
    width: int
    hidden: int | None = None


class Detector(Listed):
    """A stored detector.

    Attributes:
        id: Its id.
        object: Always ``detector``.
        name: Its name in requests.
        version: Its version; ``name@version`` always refers to this detector.
        model: The server's name of its model.
        parts: Its parts.
        bias: Added to the sum of the parts.
        link: Applied to the sum.
        threshold: The score from which it is taken to hold, where a request gives no other.
        calibration: How it separates held-out examples, by threshold, the highest first.
        shared: Whether every tenant may use it.
        own: Whether it belongs to the caller's tenant.
        format: The format of its upload; ``trained`` if the server trained it.
        source_sha256: SHA-256 of the uploaded file, hexadecimal.
        sha256: SHA-256 of its content, hexadecimal.
        bytes: The size of its content in bytes.
        created_at: The time of its creation, in seconds since 1970.
        training: Its training; null if it was uploaded.
    """

    object: Literal["detector"] = "detector"
    name: str
    version: int
    model: str
    parts: list[DetectorPart]
    bias: float
    link: Link
    threshold: float | None
    calibration: list[RocPoint]
    shared: bool
    own: bool
    format: Literal["safetensors", "json", "trained"]
    source_sha256: str | None = None
    sha256: str
    bytes: int
    created_at: float
    training: DetectorTraining | None = None


class DetectorList(Page[Detector]):
    """A page of detectors, the newest first, in the format of OpenAI's lists."""
