"""The response of ``GET /v1/capabilities``: the points, operations and limits of this model and server."""

from __future__ import annotations

from pydantic import BaseModel, Field


class PointCapability(BaseModel):
    """One kind of point."""

    name: str = Field(description="Such as logits, or layers.*.attn.q for that leaf of every layer.")
    shape: list[int] = Field(description="Of one position's value; empty for a single token id.")
    width: int = Field(description="Numbers in one position's value; a vector must have as many.")
    tier: str = Field(description="`tap` runs in the compiled step, `eager` makes steps run uncompiled.")
    operations: list[str] = Field(description="Operations that may name the point.")


class ModelSizes(BaseModel):
    """Sizes of the model."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    max_model_len: int = Field(description="Most tokens of prompt and answer together.")


class CapabilityLimits(BaseModel):
    """Limits of one request, unless it says otherwise."""

    max_operations: int = Field(description="Operations that one prompt has.")
    max_tensor_bytes: int = Field(description="Bytes of one tensor sent.")
    max_capture_bytes: int = Field(description="Bytes that one request may capture.")
    max_num_batched_tokens: int = Field(
        description="Tokens of one step; `ablate` by mean needs the prompt within it."
    )
    max_body_bytes: int | None = Field(default=None, description="Bytes of a request's body.")
    max_json_depth: int | None = Field(default=None, description="Nesting of a request's JSON.")


class Capabilities(BaseModel):
    """The points, operations and limits of this server."""

    model: str
    architecture: str
    dtype: str = Field(description="Of the model's values, and of captures that name none.")
    points: list[PointCapability]
    operations: list[str]
    limits: CapabilityLimits
    sizes: ModelSizes
