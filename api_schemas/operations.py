"""The operations of a request's ``interventions``, one class each.

They define the syntax of a request; its meaning for a model (layers, widths, positions, tokens) is checked by
``nnsight_engine.plans.compile.request``. Operations apply in the given order: at the same point and
position, later ones see the effect of earlier ones.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from api_schemas.conditions import Condition, NamedDetector
from api_schemas.detectors import DetectorName
from api_schemas.errors import ErrorCode
from api_schemas.fields import At, Integer, Items, Layers, Name, Number, Strict, Token
from api_schemas.tensors import TensorInput
from api_schemas.where import Where

InputDtype = Literal["float32", "float16", "bfloat16"]


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


class _PointOperation(_Operation):
    """An operation that names its points by their string form."""

    at: At = Field(description="A point such as layers.3.output, a pattern, or a list of them.")


class _Write(_PointOperation):
    """An operation that changes the value, always or under a condition."""

    when: Condition | None = Field(
        default=None, description="The condition under which it acts at a position; always by default."
    )


class Steer(_Write):
    """Move the value along a vector.

    With ``v`` the vector and ``s`` the scale: ``add`` x + s·v; ``norm_match`` x + s·‖x‖·v/‖v‖;
    ``project_out`` x without s times its part along v; ``clamp`` sets the part along v/‖v‖ to s;
    ``replace`` s·v.
    """

    op: Literal["steer"] = "steer"
    vector: TensorInput = Field(description="[width] for all points, or [points, width].")
    scale: Number = 1.0
    mode: Literal["add", "norm_match", "project_out", "clamp", "replace"] = "add"


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
            raise PydanticCustomError(
                ErrorCode.INVALID_SHAPE.value,
                "`vector` must be given with `method` vector and with no other",
                {"field": "vector"},
            )
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
            raise PydanticCustomError(
                ErrorCode.INVALID_SHAPE.value,
                "`patch` needs `where.positions` or `where.images`, a position for each row of `values`",
                {"field": "where.positions"},
            )
        return self


class Capture(_PointOperation):
    """Return the values."""

    op: Literal["capture"] = "capture"
    reduce: Literal["none", "mean", "last"] = Field(
        default="none", description="Every row, their mean, or the row of the last position."
    )
    dtype: InputDtype | None = Field(default=None, description="Dtype of the result; null for the model's.")


class Probe(_PointOperation):
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
            raise PydanticCustomError(
                ErrorCode.INVALID_VALUE.value,
                "a lens with `top_k` 0 returns nothing; ask for at least one token, or name `targets`",
                {"field": "top_k"},
            )
        return self


class Detect(_Operation):
    """Return a stored detector's score at each position."""

    op: Literal["detect"] = "detect"
    detector: DetectorName | NamedDetector = Field(description="A detector's name, such as refusal@2.")


class _Mark(_Operation):
    """An operation that only tells where a condition holds."""

    when: Condition = Field(description="The condition.")


class Stop(_Mark):
    """End the choice at the first position where a condition holds, which is the last of its text."""

    op: Literal["stop"] = "stop"


class Flag(_Mark):
    """Return the positions where a condition holds."""

    op: Literal["flag"] = "flag"
