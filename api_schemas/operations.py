"""The operations of a request's ``interventions``, one class each, and the positions at which they act.

They define the syntax; its meaning for a model is checked by ``nnsight_engine.plans.compile.request``,
the code of ``trace`` by ``nnsight_engine.vllm_backend.trace_code``. Operations apply in the given
order: at the same point and position, later ones see the effect of earlier ones. Positions are absolute,
because prefill and decode do not identify them reliably: after a preemption generated tokens are
prefilled again.
"""

from __future__ import annotations

import base64
import binascii
import keyword
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Discriminator, Field, JsonValue, PrivateAttr, Tag, field_validator, model_validator
from pydantic_core import PydanticCustomError

from api_schemas.conditions import Condition, NamedDetector
from api_schemas.detectors import DetectorName
from api_schemas.dictionaries import DictionaryName, FeatureName, NamedDictionary
from api_schemas.errors import ErrorCode
from api_schemas.fields import At, Integer, Items, Layers, Name, Number, Strict, Token, field_error
from api_schemas.tensors import TensorInput, TensorObject


class WhereClause(Strict):
    """Conditions on a position; absent conditions, or null, match every position."""

    phase: Literal["prompt", "generated", "all"] = Field(
        default="all", description="Positions of the prompt, of generated tokens, or both."
    )
    positions: Items[Integer] | None = Field(
        default=None, description="Absolute positions; negatives count from the prompt's end."
    )
    range: tuple[Integer, Integer | None] | None = Field(
        default=None,
        description="[start, stop], half-open; negatives count from the prompt's end; stop may be null.",
    )
    tokens: Items[Token] | None = Field(
        default=None,
        description="The input token at the position is one of these ids, or texts from /v1/tokenize.",
    )
    images: Items[Integer] | None = Field(
        default=None,
        description="The position is one of these images', counted from 0; negatives count from the last.",
    )
    scope: Literal["content", "reasoning", "tool_calls"] | None = Field(
        default=None, description="The token sampled from the position belongs to this part of the answer."
    )


class Where(WhereClause):
    """Positions that meet every condition and are not matched by ``exclude``; by default all."""

    exclude: WhereClause | None = Field(default=None, description="Positions to take out.")


InputDtype = Literal["float32", "float16", "bfloat16"]


MAX_VECTORS: Final = 64
"""Vectors of one operation."""
MAX_FEATURES_READ: Final = 100
"""Features that `features` returns at one position."""
MAX_FEATURES_CHANGED: Final = 64
"""Features that `feature` changes."""

_NUMBERS_OF_MODES: Final = {"gain": "affine", "offset": "affine", "low": "clamp", "high": "clamp"}


def _invalid(message: str, field: str, code: ErrorCode = ErrorCode.INVALID_SHAPE) -> PydanticCustomError:
    return field_error(code, message, field)


def _check_once(features: list[tuple[str, int | str]]) -> None:
    """Reject a feature that is named twice; labels and ids are compared once they are resolved."""
    seen: set[int | str] = set()
    for field, feature in features:
        if feature in seen:
            raise _invalid("a feature may be named once", field, ErrorCode.INVALID_VALUE)
        seen.add(feature)


class _Operation(Strict):
    """Fields of all operations."""

    where: Where = Field(default=Where(), description="The positions at which it acts; all by default.")
    name: Name | None = Field(
        default=None, description="Key of the result; by default the operation and its index, `capture_2`."
    )
    prompts: Items[Annotated[Integer, Field(ge=0)]] | None = Field(
        default=None,
        min_length=1,
        description="The prompts of the request that it applies to, counted from 0; all by default.",
    )


class PointOperation(_Operation):
    """An operation that names its points by their string form."""

    at: At = Field(description="A point such as layers.3.output, a pattern, or a list of them.")


class _Write(PointOperation):
    """An operation that changes the value, always or under a condition."""

    when: Condition | None = Field(
        default=None, description="The condition under which it acts at a position; always by default."
    )


class WeightedVector(Strict):
    """One of several vectors of an operation."""

    vector: TensorInput = Field(description="[width] for all points, or [points, width].")
    weight: Number = 1.0


class Steer(_Write):
    """Move the value along a vector, or along the weighted sum of several.

    With ``v`` the vector, ``s`` the scale and ``c`` the value's component along v/‖v‖: ``add`` x + s·v;
    ``norm_match`` x + s·‖x‖·v/‖v‖; ``project_out`` x without s times its part along v, or in the span of
    all ``vectors``; ``clamp`` sets c to s, or to the nearest number from ``low`` to ``high``; ``affine`` sets
    c to gain·c + offset; ``replace`` s·v.
    """

    op: Literal["steer"] = "steer"
    vector: TensorInput | None = Field(
        default=None, description="[width] for all points, or [points, width]; null with `vectors`."
    )
    vectors: Items[WeightedVector] | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_VECTORS,
        description="Several vectors instead of one: their weighted sum, for `project_out` their span.",
    )
    scale: Number | None = Field(default=None, description="Null for 1; not with `affine`, `low` or `high`.")
    mode: Literal["add", "norm_match", "project_out", "clamp", "affine", "replace"] = "add"
    gain: Number | None = Field(default=None, description="Of `affine`; null for 1.")
    offset: Number | None = Field(default=None, description="Of `affine`; null for 0.")
    low: Number | None = Field(default=None, description="Of `clamp`; null for no lower bound.")
    high: Number | None = Field(default=None, description="Of `clamp`; null for no upper bound.")

    @model_validator(mode="after")
    def _check_vectors(self) -> Self:
        if (self.vector is None) == (self.vectors is None):
            raise _invalid("`steer` needs either `vector` or `vectors`, and not both", "vector")
        weighted_vectors = [] if self.vectors is None or self.mode != "project_out" else self.vectors
        for index, weighted in enumerate(weighted_vectors):
            if weighted.weight != 1.0:
                raise _invalid(
                    "`project_out` removes the span of its vectors, on which weights have no effect; leave "
                    "`weight` out",
                    f"vectors.{index}.weight",
                )
        return self

    @model_validator(mode="after")
    def _check_numbers(self) -> Self:
        for field, mode in _NUMBERS_OF_MODES.items():
            if getattr(self, field) is not None and self.mode != mode:
                raise _invalid(f"`{field}` belongs to `mode` {mode} and no other", field)
        if self.mode == "affine" and self.gain is None and self.offset is None:
            raise _invalid("`affine` needs `gain`, `offset` or both", "gain")
        if self.scale is not None and (self.mode == "affine" or self.has_bounds):
            instead = "`gain` and `offset`" if self.mode == "affine" else "`low` and `high`"
            raise _invalid(f"`scale` has no effect beside {instead}; leave it out", "scale")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise _invalid("`low` must not exceed `high`", "low", ErrorCode.INVALID_VALUE)
        return self

    @property
    def has_bounds(self) -> bool:
        return self.low is not None or self.high is not None


class Ablate(_Write):
    """Replace the value by zero, by its mean over the given prompt positions, or by a given vector."""

    op: Literal["ablate"] = "ablate"
    method: Literal["zero", "mean", "vector"] = "zero"
    vector: TensorInput | None = Field(
        default=None, description="With `method` vector: [width] for all points, or [points, width]."
    )
    units: Items[Integer] | None = Field(
        default=None, description="Indices into the flat value; null for all of it."
    )

    @model_validator(mode="after")
    def _check_vector(self) -> Self:
        if (self.method == "vector") != (self.vector is not None):
            raise _invalid("`vector` must be given with `method` vector and with no other", "vector")
        return self


class Patch(_Write):
    """Replace the value by given ones, one row per position, in the order of ``where``."""

    op: Literal["patch"] = "patch"
    values: TensorInput = Field(
        description="[positions, width] for all points, or [points, positions, width]."
    )
    where: Where = Field(description="It must have `positions` or `images`, in the order of the rows.")

    @model_validator(mode="after")
    def _check_positions(self) -> Self:
        if self.where.positions is None and self.where.images is None:
            raise _invalid(
                "`patch` needs `where.positions` or `where.images`, a position for each row of `values`",
                "where.positions",
            )
        return self


class Capture(PointOperation):
    """Return the values."""

    op: Literal["capture"] = "capture"
    reduce: Literal["none", "mean", "last"] = Field(
        default="none", description="Every row, their mean, or the row of the last position."
    )
    dtype: InputDtype | None = Field(default=None, description="Dtype of the result; null for the model's.")


class Probe(PointOperation):
    """Return one number per position: the value's dot product with the weights, plus a bias."""

    op: Literal["probe"] = "probe"
    weights: TensorInput = Field(description="[width] for all points, or [points, width].")
    bias: Number = 0.0


class LogitLens(_Operation):
    """Return the tokens that the residual stream after chosen layers predicts.

    The final norm and the unembedding are applied to it, a method from nostalgebraist, "interpreting GPT: the
    logit lens" (2020).
    """

    op: Literal["logit_lens"] = "logit_lens"
    layers: Layers = Field(default="all", description="`all`, a selection such as 3:9, or a list.")
    top_k: Integer = Field(default=5, ge=0, le=100, description="Most likely tokens per position.")
    targets: Items[Token] | None = Field(
        default=None, max_length=100, description="Tokens whose log-probability and rank are returned."
    )

    @model_validator(mode="after")
    def _check_returns_something(self) -> Self:
        if self.top_k == 0 and not self.targets:
            raise _invalid(
                "a lens with `top_k` 0 returns nothing; ask for at least one token, or name `targets`",
                "top_k",
                ErrorCode.INVALID_VALUE,
            )
        return self


class Detect(_Operation):
    """Return a stored detector's score at each position."""

    op: Literal["detect"] = "detect"
    detector: DetectorName | NamedDetector = Field(description="A detector's name, such as refusal@2.")


class Features(_Operation):
    """Return the activations of a stored dictionary's features at each position.

    Those of the most active features, the strongest first, or those of given ones.
    """

    op: Literal["features"] = "features"
    dictionary: DictionaryName | NamedDictionary = Field(
        description="A dictionary's name, such as layer12@2."
    )
    top_k: Annotated[Integer, Field(ge=1, le=MAX_FEATURES_READ)] | None = Field(
        default=None, description="Most features per position; null for 10. Not with `features`."
    )
    features: Items[FeatureName] | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_FEATURES_READ,
        description="The features, by id or exact label, each once; instead of `top_k`.",
    )

    @model_validator(mode="after")
    def _check_features(self) -> Self:
        if self.features is None:
            return self
        if self.top_k is not None:
            raise _invalid("`features` has either `top_k` or `features`", "top_k", ErrorCode.INVALID_VALUE)
        _check_once([(f"features.{index}", feature) for index, feature in enumerate(self.features)])
        return self


class FeatureChange(Strict):
    """A new activation of a feature, in place of ``a``.

    ``set`` value; ``add`` a + value; ``scale`` a * value; ``ablate`` 0.
    """

    feature: FeatureName = Field(description="Its id or its exact label.")
    mode: Literal["set", "add", "scale", "ablate"] = "set"
    value: Number | None = Field(default=None, description="Required; not with `ablate`.")

    @model_validator(mode="after")
    def _check_value(self) -> Self:
        if (self.value is None) != (self.mode == "ablate"):
            message = (
                "`ablate` has no `value`" if self.value is not None else f"`{self.mode}` needs a `value`"
            )
            raise _invalid(message, "value")
        return self


class Feature(_Operation):
    """Change activations of a stored dictionary's features, and nothing else of the value.

    The value is the one that the dictionary reconstructs; the error of the reconstruction stays in it.
    """

    op: Literal["feature"] = "feature"
    dictionary: DictionaryName | NamedDictionary = Field(
        description="A dictionary's name, such as layer12@2."
    )
    changes: Items[FeatureChange] = Field(
        min_length=1, max_length=MAX_FEATURES_CHANGED, description="Each of another feature."
    )
    when: Condition | None = Field(
        default=None, description="The condition under which it acts at a position; always by default."
    )

    @model_validator(mode="after")
    def _check_changes(self) -> Self:
        _check_once(
            [(f"changes.{index}.feature", change.feature) for index, change in enumerate(self.changes)]
        )
        return self


class _Mark(_Operation):
    """An operation that only tells where a condition holds."""

    when: Condition = Field(description="The condition.")


class Stop(_Mark):
    """End the choice at the first position where a condition holds, which is the last of its text."""

    op: Literal["stop"] = "stop"


class Flag(_Mark):
    """Return the positions where a condition holds."""

    op: Literal["flag"] = "flag"


Write = Steer | Ablate | Patch | Feature
"""Operations that change values, under a condition if they have one."""

AnyOperation = (
    Steer | Ablate | Patch | Capture | Probe | LogitLens | Detect | Features | Feature | Stop | Flag
)
"""All of them, in the order in which they are listed."""


MAX_CODE_CHARACTERS: Final = 65536
MODEL_NAME: Final = "model"
TRACER_NAME: Final = "tracer"


def _form_of_variable(value: Any) -> str:
    """Return pydantic's tag of a variable: an object with ``dtype`` and ``data`` is a tensor."""
    is_tensor = isinstance(value, TensorObject) or (
        isinstance(value, dict) and {"dtype", "data"} <= value.keys()
    )
    return "tensor" if is_tensor else "plain"


Variable = Annotated[
    Annotated[TensorObject, Tag("tensor")] | Annotated[JsonValue, Tag("plain")],
    Discriminator(_form_of_variable),
]
"""A value of JSON, or a tensor."""


class Trace(Strict):
    """Run Python with the request; its saved values are the result.

    The code is the inside of ``with model.trace(prompt) as tracer:``, with the names ``model``, ``tracer``,
    ``torch``, ``save`` and ``nnsight_engine``, and the variables.
    """

    op: Literal["trace"] = "trace"
    name: Name | None = Field(
        default=None, description="Key of the result; by default the operation and its index, `trace_0`."
    )
    code: Annotated[str, Field(strict=True, min_length=1, max_length=MAX_CODE_CHARACTERS)] | None = Field(
        default=None, description="Python statements."
    )
    variables: dict[Name, Variable] = Field(
        default={}, description="Variables of the code, by name: JSON values or tensor objects."
    )
    block: str | None = Field(
        default=None,
        description="Instead of `code`: the library's message of one block, in base64.",
    )

    _data: bytes = PrivateAttr(default=b"")

    @property
    def data(self) -> bytes:
        """The decoded message of ``block``."""
        return self._data

    @field_validator("variables")
    @classmethod
    def _check_names(cls, variables: dict[str, Any]) -> dict[str, Any]:
        for name in variables:
            if not name.isidentifier() or keyword.iskeyword(name) or name in {MODEL_NAME, TRACER_NAME}:
                raise field_error(
                    ErrorCode.INVALID_VALUE,
                    "`variables` must be named as Python's variables are, and neither `model` nor `tracer`",
                )
        return variables

    @model_validator(mode="after")
    def _check_code(self) -> Self:
        if (self.code is None) == (self.block is None):
            raise _invalid("`trace` needs `code` or `block`, and not both", "code")
        if self.block is not None:
            self._data = _decoded_block(self.block)
            if self.variables:
                raise _invalid(
                    "a `block` brings its variables itself; `variables` belong to `code`", "variables"
                )
        return self


def _decoded_block(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error) as error:
        message = "`block` must be base64 with padding (RFC 4648), and it is not"
        raise _invalid(message, "block", ErrorCode.WRONG_ENCODING) from error
