"""The served model's identity, and the check that a trace was written for it."""

from __future__ import annotations

import dataclasses
import posixpath
from typing import Final

from api_schemas.errors import ApiError, ErrorCode
from nnsight_engine.remote_backend.messages import TraceHead

_DEFAULT_REVISION: Final = "main"


@dataclasses.dataclass(frozen=True, slots=True)
class ServedModel:
    """The names and the identity of the served model.

    Attributes:
        names: The names under which it is served.
        source: A repository's name, or a folder.
        fingerprint: Hash of the model's shape, see ``fingerprint_of``; empty until the model is loaded.
        revision: The repository's revision, if the server was started with one.
        adapters: The names of its LoRA adapters, each of which is a model for clients.
    """

    names: tuple[str, ...]
    source: str
    fingerprint: str = ""
    revision: str = ""
    adapters: tuple[str, ...] = ()

    @property
    def all_names(self) -> tuple[str, ...]:
        """The names that clients may use; those under which it is served come first."""
        source = _normal(self.source)
        others = (posixpath.basename(source),) if _is_path(source) else (source, posixpath.basename(source))
        return tuple(dict.fromkeys((*self.names, *others, *self.adapters)))

    def check(self, head: TraceHead) -> None:
        """Raise ApiError unless a trace's blocks are for this model.

        A folder on the client's machine does not identify the model here, so for a folder the fingerprint
        decides.
        """
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
        decides = _is_path(head.model) and knows_shapes
        if is_same_shape if decides else self._is_called(head.model):
            return
        raise ApiError(
            ErrorCode.MODEL_NOT_FOUND,
            f"The trace is for the model {head.model!r}, and this server has {self.names[0]!r}; "
            "GET /v1/status lists its names.",
            "model",
        )

    def _is_called(self, name: str) -> bool:
        return name in self.names or _normal(name) in {
            _normal(self.source),
            posixpath.basename(_normal(self.source)),
        }


def _is_path(name: str) -> bool:
    return name.startswith(("/", "./", "../", "~")) or "\\" in name


def _normal(name: str) -> str:
    return posixpath.normpath(name)
