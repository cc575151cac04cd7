"""The served model: its identity, its capabilities, and the check that a trace was written for it."""

from __future__ import annotations

import dataclasses
import math
import posixpath
import re
from collections.abc import Mapping
from typing import Any, Final

from api_schemas.errors import ApiError, ErrorCode, clip
from api_schemas.points import PointPattern, point_name
from api_schemas.server import Capabilities, CapabilityLimits, ModelSizes, PointCapability
from app.auth.principal import takes_code
from app.formats.json_bodies import MAX_JSON_DEPTH
from app.settings import Settings
from nnsight_engine.core.model_spec import LeafSpec, ModelSpec
from nnsight_engine.remote_backend.messages import TraceHead

MODELS: Final = "/v1/models"
_DEFAULT_REVISION: Final = "main"
_CACHED: Final = re.compile(r"models--(?P<owner>[^/]+)--(?P<name>[^/]+?)(/|$)")
"""A repository's folder in the cache of Hugging Face."""
_MEANINGLESS: Final = re.compile(
    r"(?:globalstep|checkpoint|epoch|step|run)?[0-9]*|final|last|latest|model|output|[0-9a-f]{40}"
)
"""Folders whose names say nothing about the model."""
_ALIASES: Final = {"gpt2small": "gpt2"}
"""TransformerLens' names that are not those of repositories."""


@dataclasses.dataclass(frozen=True, slots=True)
class ServedModel:
    """The names and the identity of the served model; ``source`` is a repository's name, or a folder.

    ``fingerprint`` (see ``fingerprint_of``) is empty until the model is loaded.
    """

    names: tuple[str, ...]
    source: str
    fingerprint: str = ""
    revision: str = ""
    adapters: tuple[str, ...] = ()

    @property
    def all_names(self) -> tuple[str, ...]:
        """The names that clients may use; those under which it is served come first."""
        source = posixpath.normpath(self.source)
        base_name = posixpath.basename(source)
        source_names = (base_name,) if _is_path(source) else (source, base_name)
        return tuple(dict.fromkeys((*self.names, *source_names, *self.adapters)))

    def is_other(self, name: str) -> bool:
        """Return whether a file that names its model is for another one; False if that cannot be told.

        ``Llama-3.2-1B`` and ``meta-llama/llama-3.2-1b`` are one model. A folder on the author's machine says
        nothing, nor does a folder here that is called ``checkpoint-400``.
        """
        ours = {
            plain
            for own_name in (*self.all_names, self.source)
            if not _MEANINGLESS.fullmatch(plain := _comparable(own_name))
        }
        return bool(ours) and not _is_path(name) and bool(_comparable(name)) and _comparable(name) not in ours

    def warnings_of(self, name: str, file: str, refused: ErrorCode | None = None) -> list[str]:
        """Return a warning about a file of another model, or raise the ApiError ``refused`` instead."""
        if not self.is_other(name):
            return []
        message = (
            f"{file} names the model {clip(name)!r}, and this server has {self.names[0]!r}: unless they are "
            "one model, its numbers mean nothing here"
        )
        if refused is not None:
            raise ApiError(refused, f"{message}; without `strict` this is a warning.", "strict")
        return [f"{message}."]

    def check(self, head: TraceHead) -> None:
        """Raise ApiError unless a trace is for this model; for a client's folder the fingerprint decides."""
        if head.revision and head.revision != (self.revision or _DEFAULT_REVISION):
            raise ApiError(
                ErrorCode.MODEL_NOT_FOUND,
                f"The trace is for the revision {head.revision!r} of {head.model!r}, and this server has "
                f"{self.revision or _DEFAULT_REVISION!r}.",
                "revision",
            )
        if head.model in self.adapters:
            if head.dialect != "vllm":
                raise ApiError(
                    ErrorCode.UNSUPPORTED_COMBINATION,
                    f"{head.model!r} is a LoRA adapter, with which only vLLM runs: write the blocks against "
                    "VLLM(...).",
                    "model",
                )
            return
        knows_shapes = bool(self.fingerprint and head.fingerprint)
        is_same_shape = knows_shapes and head.fingerprint == self.fingerprint
        fingerprint_decides = _is_path(head.model) and knows_shapes
        is_ours = is_same_shape if fingerprint_decides else self._is_called(head.model)
        if is_ours:
            return
        raise ApiError(
            ErrorCode.MODEL_NOT_FOUND,
            f"The trace is for the model {head.model!r}, and this server has {self.names[0]!r}; "
            "GET /v1/status lists its names.",
            "model",
        )

    def _is_called(self, name: str) -> bool:
        return name in self.names or posixpath.normpath(name) in {
            posixpath.normpath(self.source),
            posixpath.basename(posixpath.normpath(self.source)),
        }


def _is_path(name: str) -> bool:
    return name.startswith(("/", "./", "../", "~")) or "\\" in name


def _comparable(name: str) -> str:
    """Return a model's name without owner, case, punctuation, and the ``hf`` of converted weights."""
    cached = _CACHED.search(name)
    base = cached["name"] if cached else posixpath.basename(posixpath.normpath(name))
    plain = re.sub(r"[^0-9a-z]", "", base.lower()).removesuffix("hf")
    return _ALIASES.get(plain, plain)


def describe(spec: ModelSpec, settings: Settings) -> Capabilities:
    """Return what clients may know of the served model: its points, operations, limits and sizes."""
    operations = {operation for leaf in spec.leaves for operation in leaf.operations}
    generates = any(leaf.name == "logits" for leaf in spec.leaves)
    operations |= {"trace"} if generates and takes_code(settings) else set()
    return Capabilities(
        model=spec.name,
        architecture=spec.architecture,
        dtype=spec.dtype,
        points=[_capability_of(leaf) for leaf in spec.leaves],
        operations=sorted(operations),
        limits=CapabilityLimits(
            max_operations=settings.bounds.max_operations,
            max_tensor_bytes=settings.bounds.max_tensor_bytes,
            max_capture_bytes=spec.max_capture_bytes,
            max_work=spec.max_work,
            max_num_batched_tokens=spec.max_num_batched_tokens,
            max_body_bytes=settings.max_body_bytes,
            max_json_depth=MAX_JSON_DEPTH,
        ),
        sizes=ModelSizes(
            num_layers=spec.num_layers,
            hidden_size=spec.hidden_size,
            vocab_size=spec.vocab_size,
            max_model_len=spec.max_model_len,
        ),
    )


def spec_of(capabilities: Capabilities) -> ModelSpec:
    """Return the model's spec as far as its capabilities tell it, for checks before the engine is asked."""
    sizes = capabilities.sizes
    leaves = tuple(
        LeafSpec(
            PointPattern.parse(point.name).leaf,
            tuple(point.shape),
            point.tier,
            tuple(point.operations),
            None if point.layers is None else tuple(point.layers),
        )
        for point in capabilities.points
    )
    return ModelSpec(
        name=capabilities.model,
        architecture=capabilities.architecture,
        num_layers=sizes.num_layers,
        hidden_size=sizes.hidden_size,
        vocab_size=sizes.vocab_size,
        dtype=capabilities.dtype,
        max_model_len=sizes.max_model_len,
        max_num_batched_tokens=capabilities.limits.max_num_batched_tokens,
        leaves=leaves,
        max_capture_bytes=capabilities.limits.max_capture_bytes,
        max_work=math.inf if capabilities.limits.max_work is None else capabilities.limits.max_work,
    )


def _capability_of(leaf: LeafSpec) -> PointCapability:
    return PointCapability(
        name=point_name(leaf.name),
        shape=list(leaf.shape),
        width=leaf.width,
        tier=leaf.tier,
        operations=list(leaf.operations),
        layers=None if leaf.layers is None else list(leaf.layers),
    )


def model_of(listed: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a model of the caller's list; raises ApiError ``model_not_found``."""
    for card in listed["data"]:
        if card["id"] == name:
            model: dict[str, Any] = card
            return model
    raise ApiError(
        ErrorCode.MODEL_NOT_FOUND,
        f"The model {clip(name)!r} does not exist, or is not yours; GET {MODELS} lists the names.",
        "model",
    )
