"""The response of ``GET /v1/capabilities``: the points, operations and limits of this model and server."""

from __future__ import annotations

from pydantic import BaseModel, Field


class PointCapability(BaseModel):
    """One kind of point."""

    name: str = Field(description="A point such as logits, or layers.*.attn.q for that leaf of every layer.")
    shape: list[int] = Field(description="Shape of one position's value; empty for a single token id.")
    width: int = Field(description="Number of elements of one position's value, and of a vector for it.")
    tier: str = Field(description="`tap` runs in the compiled step, `eager` makes steps run uncompiled.")
    operations: list[str] = Field(description="Operations that may name the point.")
    layers: list[int] | None = Field(
        default=None, description="The layers that have it in this shape; null for all."
    )


class ModelSizes(BaseModel):
    """Sizes of the model."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    max_model_len: int = Field(description="Maximum number of tokens of prompt and answer together.")


class CapabilityLimits(BaseModel):
    """Limits of one request, except where a field names another scope."""

    max_operations: int = Field(description="Operations for one prompt.")
    max_tensor_bytes: int = Field(description="Bytes of one tensor in a request, decoded.")
    max_capture_bytes: int = Field(description="Bytes that one request may capture.")
    max_work: float | None = Field(
        default=None,
        description="Work of a request's operations at one position, as a multiple of the model's own.",
    )
    max_num_batched_tokens: int = Field(
        description="Tokens of one step; `ablate` by mean needs the whole prompt in one step."
    )
    max_body_bytes: int | None = Field(default=None, description="Bytes of a request's body.")
    max_json_depth: int | None = Field(default=None, description="Nesting depth of a request's JSON.")


class Capabilities(BaseModel):
    """The points, operations and limits of this server."""

    model: str
    adapters: list[str] = Field(
        default=[], description="LoRA adapters of the model, each a model of its own."
    )
    architecture: str
    dtype: str = Field(description="Dtype of the model's values, and by default of captures.")
    points: list[PointCapability]
    operations: list[str]
    scopes: list[str] = Field(default=[], description="Parts of answers that a where-clause can name.")
    limits: CapabilityLimits
    sizes: ModelSizes
