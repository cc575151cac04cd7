"""The data that a traced request carries in ``SamplingParams.extra_args``, and the marks of saved values.

The whole trace is sent with each request, since it is not known which the engine runs first; it is decoded
once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final

import msgspec

from nnsight_engine.core.saves import SAVES
from nnsight_engine.vllm_backend.traces.block_adapters import NO_ADAPTER

TRACE_KEY: Final = "nnsight_engine_trace"


class EditEntry(msgspec.Struct, frozen=True):
    """A selected edit; ``digest`` is that of the intended block, ``data`` None if the engine stores it."""

    name: str
    digest: str
    data: bytes | None = None


class CodeOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request's code comes from; without a default, so that no code is trusted by omission.

    ``sandbox_of`` is the tenant in whose sandbox process the blocks run, None if their sender is trusted.
    """

    sandbox_of: Annotated[str, msgspec.Meta(min_length=1)] | None


class TraceEntry(CodeOrigin, frozen=True):
    """A request's part in a trace.

    Attributes:
        index: Index of the request's block among the trace's.
        num_choices: Number of requests that run the block (``n`` of its sampling parameters).
        data: All blocks, encoded; empty if the worker has them already, see ``WorkerTraces.hold``.
        groups: For each block, its variables with numbers of surrounding ones; equal ones are one variable.
        edits: The edits that run beside the block, in the order in which they receive each value.
        is_dry_run: Whether the request ends once its block has nothing new to ask for, see ``request``.
        codec: The encoding of the blocks; only trusted senders may use another than ``wire``.
        wanted: Names of variables whose values are returned although they were not saved.
        prints: Whether printed text is reported to the client instead of printed by the worker.
        plain: Whether saved values must be JSON types and tensors, see ``json_values``.
    """

    key: str
    index: Annotated[int, msgspec.Meta(ge=0)]
    num_choices: Annotated[int, msgspec.Meta(ge=1)]
    data: bytes
    groups: list[dict[str, int]]
    streams: bool = False
    edits: list[EditEntry] = []
    is_dry_run: bool = False
    is_scan: bool = False
    codec: str = "wire"
    wanted: list[str] = []
    prints: bool = False
    compresses: bool = False
    plain: bool = False
    adapter: int = NO_ADAPTER

    def to_plain(self) -> dict[str, Any]:
        plain: dict[str, Any] = msgspec.to_builtins(self, builtin_types=(bytes,))
        return plain

    def choice_of(self, request_id: str) -> int:
        """Return which of its ``n`` choices a request is: vLLM names these <choice>_<parent>."""
        return int(request_id.partition("_")[0]) if self.num_choices > 1 else 0

    @staticmethod
    def from_plain(plain: Any) -> TraceEntry:
        return msgspec.convert(plain, TraceEntry)


class Marks:
    """The values that the blocks of one trace have saved, over all threads."""

    def __init__(self, saved: Sequence[Any]) -> None:
        self.before = list(saved)
        self._kept: list[dict[int, Any]] = []

    @contextlib.contextmanager
    def collecting(self) -> Iterator[dict[int, Any]]:
        """Collect values that the calling thread saves within the context, by identity."""
        with SAVES.outermost() as marked:
            marked.update({id(value): value for value in self.before})
            self._kept.append(marked)
            yield marked

    def all(self) -> dict[int, Any]:
        return {key: value for kept in self._kept for key, value in kept.items()}
