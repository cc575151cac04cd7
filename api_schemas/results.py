"""The results of the operations of one choice, and where and how they were applied.

In a stream each chunk carries the results of its tokens, and the last one also ``applied`` and
``provenance``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from api_schemas.detectors import DetectorUsed
from api_schemas.dictionaries import DictionaryFeature, DictionaryUsed
from api_schemas.tensors import Dtype, TensorObject, VectorUsed


class TensorLink(BaseModel):
    """A tensor in a file on the server, which is deleted when it expires."""

    url: str = Field(
        description="Path on this server, such as /v1/results/<id>; a file may contain several tensors."
    )
    format: Literal["safetensors"]
    key: str = Field(description="The tensor's name in the file.")
    dtype: Dtype
    shape: list[int]
    expires_at: int = Field(description="Time at which the file is deleted, in seconds since 1970 (UTC).")


class CaptureResult(BaseModel):
    """Captured values: ``[positions, *shape of the point]``, or the point's shape when reduced."""

    type: Literal["capture"] = "capture"
    positions: list[int] = Field(description="Absolute positions of the values, ascending.")
    points: dict[str, TensorObject | TensorLink]
    reduce: Literal["none", "mean", "last"] = "none"


class NumbersResult(BaseModel):
    """Numbers that are in a file if they are too many for JSON; the result has none itself then."""

    positions: list[int]
    tensors: dict[str, TensorLink] | None = Field(
        default=None,
        description="The numbers in a file, by their path in the result; absent if they are here.",
    )


class ProbeResult(NumbersResult):
    """One number per position at each point; null if it overflowed. In a file: by point."""

    type: Literal["probe"] = "probe"
    points: dict[str, list[float | None]]


class LensToken(BaseModel):
    """A token and its log-probability: -9999.0 for minus infinity, null for NaN."""

    token: str
    id: int
    logprob: float | None


class LensTarget(LensToken):
    """A token of ``targets`` with its rank: 1 is the most likely."""

    rank: int


class LensRow(BaseModel):
    """The lens of one layer at one position."""

    top: list[LensToken]
    targets: list[LensTarget]


class LogitLensResult(NumbersResult):
    """Rows by layer (a number in digits), one per position.

    In a file, of layer 3: ``3/ids`` and ``3/logprobs``, ``[positions, top_k]``; ``3/target_logprobs`` and
    ``3/ranks``, ``[positions, targets]``.
    """

    type: Literal["logit_lens"] = "logit_lens"
    layers: dict[str, list[LensRow]]


class TraceResult(BaseModel):
    """Saved values and printed text of a trace's code.

    In JSON's types, with tensors as objects at any depth. In a stream ``saves`` has values that are new or
    have changed, ``grown`` the items appended to lists; the last chunk's ``saves`` has all values.
    """

    type: Literal["trace"] = "trace"
    saves: dict[str, Any] = Field(description="By the variable's name.")
    grown: dict[str, list[Any]] | None = None
    printed: str | None = Field(
        default=None, description="Text printed by the code; absent if there is none."
    )
    warnings: list[str] | None = Field(
        default=None, description="Values that the code requested and did not get; absent if there are none."
    )


class DetectResult(NumbersResult):
    """A detector's score at each position; null if it is not finite. In a file: ``scores``."""

    type: Literal["detect"] = "detect"
    scores: list[float | None]


class FeatureActivation(DictionaryFeature):
    """A feature and its activation at a position; null if it is not finite."""

    activation: float | None


class FeaturesResult(NumbersResult):
    """Activations of a dictionary's features, a list for each position.

    Of the most active ones, the strongest first; or of those that the request names, in its order. In a file:
    ``ids`` and ``activations``, ``[positions, features]``; a feature of the most active ones with 0 is not
    active.
    """

    type: Literal["features"] = "features"
    features: list[list[FeatureActivation]]


class StopResult(BaseModel):
    """The positions where the condition held; at the first the choice ended."""

    type: Literal["stop"] = "stop"
    positions: list[int]


class FlagResult(BaseModel):
    """The positions where the condition held."""

    type: Literal["flag"] = "flag"
    positions: list[int]


Result = Annotated[
    CaptureResult
    | ProbeResult
    | LogitLensResult
    | DetectResult
    | FeaturesResult
    | StopResult
    | FlagResult
    | TraceResult,
    Field(discriminator="type"),
]


class Applied(BaseModel):
    """Where one operation acted."""

    op: str
    at: list[str]
    positions: list[int] = Field(
        description="Absolute positions, ascending; with a condition, those where it acted."
    )
    decides: list[Literal["same", "next"]] | None = Field(
        default=None,
        description="For each test of its condition, from left to right: whether it decides for the position "
        "that it reads or for the next; absent without a condition.",
    )
    detectors: list[DetectorUsed] | None = Field(
        default=None, description="The detectors that names in it resolved to; absent if there are none."
    )
    dictionaries: list[DictionaryUsed] | None = Field(
        default=None, description="The dictionaries that names in it resolved to; absent if there are none."
    )
    vector: VectorUsed | None = Field(
        default=None, description="The vector that the operation's vector name resolved to."
    )
    vectors: list[VectorUsed] | None = Field(
        default=None, description="The same for an operation with `vectors`: those that it names, in order."
    )


class Provenance(BaseModel):
    """How the choice was computed; for a trace, only the tier."""

    fingerprint: str | None = Field(
        default=None, description="Hash of all operations that write (hex); empty without writes."
    )
    cached_tokens: int | None = Field(
        default=None, description="Number of prompt tokens whose keys and values came from the prefix cache."
    )
    recomputed_tokens: int | None = Field(
        default=None, description="Number of tokens that were recomputed after a preemption."
    )
    drafted_rows: int | None = Field(
        default=None, description="Number of rows that were computed for drafts of speculative decoding."
    )
    refused_rows: int | None = Field(
        default=None,
        description="Number of drafted rows without results: their draft was refused or lies behind a stop.",
    )
    presets: list[str] | None = Field(
        default=None, description="The presets that operations come from, with versions; absent if none."
    )
    tier: str = Field(description="`tap` if every step ran as usual, `eager` if some had to run uncompiled.")


class ChoiceInterventions(BaseModel):
    """The field ``interventions`` of a choice."""

    results: dict[str, Result] = Field(default_factory=dict, description="By the operation's name.")
    applied: list[Applied] | None = None
    images: list[list[tuple[int, int]]] | None = Field(
        default=None,
        description="The positions of each image of the prompt, as half-open ranges; absent if it has none.",
    )
    provenance: Provenance | None = None
