"""A sweep: one request for a grid of interventions, whose answer is one labelled tensor.

Each method has its axes; a cell is one intervention on one prompt, scored by one number, the metric.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, BaseModel, Discriminator, Field, RootModel, Tag, model_validator

from api_schemas.detectors import DetectorName
from api_schemas.dictionaries import DictionaryName, FeatureName
from api_schemas.errors import ErrorCode
from api_schemas.fields import (
    Integer,
    Items,
    Layers,
    Number,
    PointText,
    ShortText,
    Strict,
    Token,
    field_error,
)
from api_schemas.generation import ChatMessage
from api_schemas.operations import Where
from api_schemas.results import TensorLink
from api_schemas.tensors import TensorInput, TensorObject

MAX_SWEEP_PROMPTS: Final = 64
MAX_SWEEP_POINTS: Final = 16
MAX_AXIS: Final = 4096
"""Labels of one axis."""
MAX_WHERE: Final = 1024
"""Positions or tokens of `where`, which every cell resolves."""
MAX_FAILED_SHOWN: Final = 100
LAYER: Final = "{layer}"
"""Stands for each layer in a point's name."""


def _form(value: Any) -> str:
    """Return pydantic's tag of a prompt: a text, messages or token ids, by the first item."""
    if isinstance(value, str):
        return "text"
    first_item = value[0] if isinstance(value, list) and value else None
    return "messages" if isinstance(first_item, dict | ChatMessage) else "ids"


def _check_texts(messages: list[ChatMessage]) -> list[ChatMessage]:
    for index, message in enumerate(messages):
        parts = message.content if isinstance(message.content, list) else []
        if any(part.get("type") != "text" for part in parts):
            raise field_error(
                ErrorCode.UNSUPPORTED_COMBINATION,
                "the prompts of a sweep are text; leave images and other media out",
                f"{index}.content",
            )
    return messages


SweepText = Annotated[
    Annotated[str, Field(strict=True, min_length=1), Tag("text")]
    | Annotated[Items[ChatMessage], Field(min_length=1), AfterValidator(_check_texts), Tag("messages")]
    | Annotated[
        Items[Annotated[Integer, Field(ge=0)]], Field(min_length=1, max_length=1_000_000), Tag("ids")
    ],
    Discriminator(_form),
]
"""A text, the messages of a chat, or token ids."""


def _once(values: Any) -> Any:
    if isinstance(values, Sequence) and not isinstance(values, str) and len(set(values)) < len(values):
        raise field_error(ErrorCode.INVALID_VALUE, "each item of an axis may be named once")
    return values


def _listed(value: Any) -> str:
    return "word" if isinstance(value, str) else "list"


Axis = Field(min_length=1, max_length=MAX_AXIS)
Positions = Annotated[
    Annotated[Literal["all", "last"], Tag("word")]
    | Annotated[Items[Integer], Axis, AfterValidator(_once), Tag("list")],
    Discriminator(_listed),
]
"""Each a cell of its own: ``all`` of the prompt, the ``last``, or a list; negatives from the prompt's end."""
Heads = Annotated[
    Annotated[Literal["all"], Tag("word")]
    | Annotated[Items[Annotated[Integer, Field(ge=0)]], Axis, AfterValidator(_once), Tag("list")],
    Discriminator(_listed),
]
NumberAxis = Annotated[Items[Number], Axis, AfterValidator(_once)]


class SweepPrompt(Strict):
    """A prompt; patching also needs the one that it is compared with, of as many tokens."""

    clean: SweepText
    corrupted: SweepText | None = None


class LogprobMetric(Strict):
    """The log-probability of a token as the next one."""

    type: Literal["logprob"]
    token: Token


class LogitDifferenceMetric(Strict):
    """The logit of a token as the next one, minus that of another."""

    type: Literal["logit_difference"]
    token: Token
    other: Token


class KlMetric(Strict):
    """The divergence, in nats, of the unsteered run's next-token distribution from the cell's."""

    type: Literal["kl"]


class ProbeMetric(Strict):
    """The value at a point at the last position, times weights, plus a bias."""

    type: Literal["probe"]
    at: PointText
    weights: TensorInput
    bias: Number = 0.0


class DetectorMetric(Strict):
    """The score of a stored detector at the last position."""

    type: Literal["detector"]
    detector: DetectorName


class FeatureMetric(Strict):
    """The activation of a stored dictionary's feature at the last position."""

    type: Literal["feature"]
    dictionary: DictionaryName
    feature: FeatureName


class PerplexityMetric(Strict):
    """The perplexity of a continuation, whose tokens follow the prompt's."""

    type: Literal["perplexity"]
    continuation: Annotated[
        Annotated[str, Field(strict=True, min_length=1), Tag("word")]
        | Annotated[
            Items[Annotated[Integer, Field(ge=0)]], Field(min_length=1, max_length=100_000), Tag("list")
        ],
        Discriminator(_listed),
    ] = Field(description="A text, or token ids.")


Metric = Annotated[
    LogprobMetric
    | LogitDifferenceMetric
    | KlMetric
    | ProbeMetric
    | DetectorMetric
    | FeatureMetric
    | PerplexityMetric,
    Field(discriminator="type"),
]


class _Sweep(Strict):
    model: ShortText | None = Field(default=None, description="A name that GET /v1/models lists.")
    prompts: Items[SweepPrompt] = Field(min_length=1, max_length=MAX_SWEEP_PROMPTS)
    metric: Metric = Field(description="The number of a cell.")
    positions: Positions | None = Field(
        default=None, description="An axis; null for several at once in every cell."
    )
    stream: bool = Field(
        default=False, strict=True, description="Whether progress is sent, as server-sent events."
    )


class _PointSweep(_Sweep):
    points: Annotated[
        Items[PointText], Field(min_length=1, max_length=MAX_SWEEP_POINTS), AfterValidator(_once)
    ] = Field(
        default=["layers.{layer}.output"],
        description="An axis: points, where {layer} stands for each layer; or points without it.",
    )
    layers: Layers = Field(default="all", description="An axis: `all`, a selection such as 3:9, or a list.")


class _WhereSweep(_Sweep):
    where: Where = Field(
        default=Where(),
        description="The positions of every cell, instead of an axis; all by default. It names at most "
        f"{MAX_WHERE} positions and tokens each.",
    )

    @model_validator(mode="after")
    def _check_where(self) -> Self:
        if self.positions is not None and "where" in self.model_fields_set:
            raise field_error(
                ErrorCode.UNSUPPORTED_COMBINATION,
                "with an axis of `positions` each cell has one of them; leave `where` out",
                "where",
            )
        for name, part in (("where", self.where), ("where.exclude", self.where.exclude)):
            for field in ("positions", "tokens"):
                number = len(getattr(part, field, None) or ())
                if number > MAX_WHERE:
                    raise field_error(
                        ErrorCode.INVALID_VALUE,
                        f"a sweep names at most {MAX_WHERE} {field}, got {number}",
                        f"{name}.{field}",
                    )
        return self


class PatchSweep(_PointSweep):
    """Write values of one prompt's run into the run of the other."""

    method: Literal["patch"]
    direction: Literal["clean_to_corrupted", "corrupted_to_clean"] = "clean_to_corrupted"
    heads: Heads | None = Field(
        default=None, description="An axis, at points that have heads: each head by itself."
    )


class AblateSweep(_PointSweep, _WhereSweep):
    """Replace values by zero, or by their mean over the positions of the cell."""

    method: Literal["ablate"]
    ablation: Literal["zero", "mean"] = "zero"
    heads: Heads | None = Field(
        default=None, description="An axis, at points that have heads: each head by itself."
    )


class SteerSweep(_PointSweep, _WhereSweep):
    """Steer with a vector, at different strengths."""

    method: Literal["steer"]
    vector: TensorInput = Field(description="[width], or the name of a stored vector.")
    strengths: NumberAxis = Field(description="An axis: the scale of `steer`.")
    mode: Literal["add", "norm_match", "project_out", "clamp", "replace"] = "add"
    control: bool = Field(
        default=False,
        strict=True,
        description="Whether every cell is repeated with a random direction of the vector's norm.",
    )
    seed: Integer = Field(default=0, ge=0, lt=2**32, description="Of the random direction.")


class FeatureSweep(_WhereSweep):
    """Change features of a stored dictionary."""

    method: Literal["feature"]
    dictionary: DictionaryName
    features: Annotated[Items[FeatureName], Axis, AfterValidator(_once)] = Field(
        description="An axis: ids or exact labels."
    )
    values: NumberAxis = Field(description="An axis.")
    mode: Literal["set", "add", "scale"] = "set"


AnySweep = PatchSweep | AblateSweep | SteerSweep | FeatureSweep


class SweepRequest(RootModel[Annotated[AnySweep, Field(discriminator="method")]]):
    """A grid of interventions, one method's."""


class SweepBaseline(BaseModel):
    """The metric of one prompt's runs without interventions; null if it is not finite or not given."""

    clean: float | None
    corrupted: float | None
    unsteered: float | None = Field(description="Of the run that the cells change: one of the two.")


class FailedCell(BaseModel):
    """A cell that is NaN, and why."""

    index: list[int] = Field(description="Its index in each of the dims.")
    control: bool
    code: str
    message: str


class Sweep(BaseModel):
    """The result of a sweep.

    Attributes:
        object: Always ``sweep``.
        model: The model.
        method: The method of the request.
        metric: The type of its metric.
        dims: The names of the tensor's axes, in order; ``prompt`` and ``point`` only where there are several.
        coords: The labels of each axis.
        values: The metric of each cell, float32.
        control: The same with a random direction; null without ``control``.
        baselines: The metric without interventions, for each prompt.
        tokens: The text of each token of each prompt that the cells change.
        num_failed: The number of cells that are NaN.
        failed: The first 100 of them.
    """

    object: Literal["sweep"] = "sweep"
    model: str
    method: str
    metric: str
    dims: list[str]
    coords: dict[str, list[int | float | str]]
    values: TensorObject | TensorLink
    control: TensorObject | TensorLink | None = None
    baselines: list[SweepBaseline]
    tokens: list[list[str]]
    num_failed: int
    failed: list[FailedCell]


class SweepProgress(BaseModel):
    """The progress of a sweep.

    Attributes:
        type: Always ``progress``.
        done: The number of cells that are done.
        total: Their total number.
        seconds_left: The time for the others, at the rate so far; null before the first.
    """

    type: Literal["progress"] = "progress"
    done: int
    total: int
    seconds_left: float | None = None


class SweepEvent(BaseModel):
    """An event of a sweep: its progress, or the result.

    Attributes:
        type: ``progress`` or ``sweep``.
        done: The number of cells that are done.
        total: Their total number.
        seconds_left: The time for the others, at the rate so far.
        sweep: The result; null while the sweep runs.
    """

    type: Literal["progress", "sweep"]
    done: int | None = None
    total: int | None = None
    seconds_left: float | None = None
    sweep: Sweep | None = None
