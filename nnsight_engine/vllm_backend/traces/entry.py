"""The data that a traced request carries in ``SamplingParams.extra_args``, and the marks of saved values.

The whole trace is sent with each of its requests, because it is not known which of them the engine runs
first; the worker decodes it once.
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
    """An edit that a request has selected.

    Attributes:
        name: Its name in the engine, if it is stored there, and in messages.
        digest: Digest of the intended block; the engine may have another block under that name.
        data: The encoded block, if the engine does not store it.
    """

    name: str
    digest: str
    data: bytes | None = None


class CodeOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request's code comes from; without a default, so that no code is trusted by omission.

    Attributes:
        sandbox_of: The tenant in whose sandbox process the blocks run; None if their sender is trusted.
    """

    sandbox_of: Annotated[str, msgspec.Meta(min_length=1)] | None


class TraceEntry(CodeOrigin, frozen=True):
    """A request's part in a trace.

    Attributes:
        key: The trace.
        index: Index of the request's block among the trace's.
        num_choices: Number of requests that run the block (``n`` of its sampling parameters).
        data: All blocks, encoded, see ``serialization``; empty if the worker has received them before, see
            ``WorkerTraces.hold``.
        groups: For each block, the names of its variables with the numbers of the surrounding variables they
            refer to: equal numbers are one variable.
        streams: Whether deltas of the block's saved values are reported after each step.
        edits: The edits that run beside the block, in the order in which they receive each value.
        is_dry_run: Whether the request ends once its block has nothing new to ask for, see ``request``.
        is_scan: Whether the shapes of all modules' values are requested as well.
        codec: The encoding of the blocks; only trusted senders may use another than ``wire``.
        wanted: Names of variables whose values are returned although they were not saved.
        prints: Whether the block's printed text is reported to the client instead of printed by the worker.
        plain: Whether saved values must be JSON types and tensors, see ``json_values``.
        compresses: Whether the results of the trace are compressed.
        adapter: Id of the LoRA adapter of the request; ``NO_ADAPTER`` for none.
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
        """Return the entry as built-in types, which vLLM can carry."""
        plain: dict[str, Any] = msgspec.to_builtins(self, builtin_types=(bytes,))
        return plain

    def choice_of(self, request_id: str) -> int:
        """Return which of its ``n`` choices a request is: vLLM names these <choice>_<parent>."""
        return int(request_id.partition("_")[0]) if self.num_choices > 1 else 0

    @staticmethod
    def from_plain(plain: Any) -> TraceEntry:
        """Read the output of ``to_plain``; raises msgspec.ValidationError."""
        return msgspec.convert(plain, TraceEntry)


class Marks:
    """The values that the blocks of one trace have saved, over all threads."""

    def __init__(self, saved: Sequence[Any]) -> None:
        """Start with the values that were saved before the blocks ran."""
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
        """Return everything saved so far, by identity."""
        return {key: value for kept in self._kept for key, value in kept.items()}
