"""The server's description for clients that write blocks: its phase, its models and their modules."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import BaseModel, WithJsonSchema


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


__all__ = ["ModelStatus", "ServerStatus", "TraceOutline"]
