"""How a server describes itself: points, operations and limits; phase, models and their modules."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import BaseModel, Field, WithJsonSchema


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


class ModelStatus(BaseModel):
    """A model of a server.

    Attributes:
        name: Its name.
        names: All names by which traces may request it: those under which it is served, and the one it was
            loaded by.
        fingerprint: Fingerprint of its shape, which identifies it for traces that name a folder; empty until
            it is loaded.
        running: Whether it answers requests now.
        engines: The engines that run its traces, ``vllm`` and ``local``.
    """

    name: str
    names: list[str]
    fingerprint: str = ""
    running: bool
    engines: list[str]


class ServerStatus(BaseModel):
    """The state of a server.

    Attributes:
        phase: ``starting``, ``ready``, ``draining`` or ``dead``.
        version: Version of this package.
        python: Python version of the interpreter in which blocks run.
        models: Its models.
        in_flight: Number of requests being answered and of running jobs. For a key without the scope
            ``admin``, only completions, chats, traces and jobs of its own tenant.
        queued: Number of queued jobs and traces, of the same callers.
    """

    phase: str
    version: str
    python: str
    models: list[ModelStatus]
    in_flight: int
    queued: int = 0


# A list of one type, which more readers of schemas support than a tuple of types by index.
_FOUR_STRINGS: Final = {"type": "array", "items": {"type": "string"}, "minItems": 4, "maxItems": 4}
OutlinedModule = Annotated[tuple[str, str, str, str], WithJsonSchema(_FOUR_STRINGS)]


class TraceOutline(BaseModel):
    """The module tree of a model, for clients that write blocks without loading it.

    Attributes:
        model: The model's name.
        names: All names under which it is served.
        fingerprint: Fingerprint of its shape, see ``fingerprint_of``.
        engines: The engines that run its traces.
        class_name: The name of its class in vLLM.
        outline: vLLM's modules, parents first: path, class, description, and the path of the same module if
            it was listed before, or an empty string.
        spec: Its sizes and standard points.
    """

    model: str
    names: list[str]
    fingerprint: str
    engines: list[str]
    class_name: str
    outline: list[OutlinedModule]
    spec: dict[str, Any]
