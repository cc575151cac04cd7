"""Edits in the engine: blocks that run beside the blocks of the requests that select them.

Stored as encoded bytes and decoded anew for each request, so that no request sees another's changes to an
edit's variables. An edit runs before the request's own block, once per step, on the request's rows. Named
edits stay in the worker until they are removed; an edit without a name arrives with its request.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from nnsight_engine.core.saves import SAVES
from nnsight_engine.envoys.tracers.steps import IteratorTracer
from nnsight_engine.interleaving.threads import ThreadMediator
from nnsight_engine.serialization import TRUSTED, DecodeError, Policy, decode_trace
from nnsight_engine.tracing.tracer import Info, compiled
from nnsight_engine.vllm_backend.traces.errors import EditLimitError, UnknownEditError
from nnsight_engine.vllm_backend.traces.points import place_named

if TYPE_CHECKING:
    from nnsight_engine.interleaving.threads import Threads
    from nnsight_engine.vllm_backend.traces.context import EditEntry, TraceEntry
    from nnsight_engine.vllm_backend.traces.model import WorkerModel


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class EditStore:
    def __init__(self, max_edits: int, max_bytes: int) -> None:
        self._max_edits = max_edits
        self._max_bytes = max_bytes
        self._data: dict[str, bytes] = {}

    @property
    def num_kept(self) -> int:
        return len(self._data)

    def keep(self, name: str, data: bytes, model: WorkerModel, threads: Threads) -> None:
        """Store an edit once it has been decoded without an error; raises EditLimitError or DecodeError."""
        other_edits = {key: stored for key, stored in self._data.items() if key != name}
        num_bytes = sum(map(len, other_edits.values())) + len(data)
        if len(other_edits) >= self._max_edits or num_bytes > self._max_bytes:
            raise EditLimitError.over(name, len(other_edits) + 1, self._max_edits, num_bytes, self._max_bytes)
        threads.run(lambda: _read(data, model))
        self._data[name] = data

    def remove(self, name: str) -> None:
        """Remove an edit; requests that already run it continue to."""
        self._data.pop(name, None)

    def mediators(
        self,
        entry: TraceEntry,
        choice: int,
        model: WorkerModel,
        threads: Threads,
        enter: Callable[[], None],
        policy: Policy = TRUSTED,
    ) -> list[ThreadMediator]:
        """Return the mediators of the edits that a request selected, in order; raises UnknownEditError.

        ``choice`` is the request's number among the ``n`` of its prompt; ``enter`` is called on each edit's
        thread before the edit runs.
        """
        made: list[ThreadMediator] = []
        for number, chosen in enumerate(entry.edits):
            data = self._chosen(chosen)
            info: Info = threads.run(lambda data=data: _read(data, model, policy))  # type: ignore[misc] # a default
            run = _every_step(compiled(info, info.variables), model, enter)
            seed = zlib.crc32(f"{entry.key}/{entry.index}/{choice}/{number}".encode())
            name = f"the edit {chosen.name!r}"
            made.append(ThreadMediator(run, info, threads, seed=seed, name=name))
        return made

    def filled_in(self, entry: TraceEntry) -> TraceEntry:
        """Return the request with the bytes of all its edits, stored ones too; raises UnknownEditError."""
        if not entry.edits:
            return entry
        brought = [msgspec.structs.replace(chosen, data=self._chosen(chosen)) for chosen in entry.edits]
        return msgspec.structs.replace(entry, edits=brought)

    def _chosen(self, chosen: EditEntry) -> bytes:
        """Return the bytes of a selected edit; UnknownEditError if the engine lacks the one meant."""
        data = chosen.data if chosen.data is not None else self._data.get(chosen.name)
        if data is None or digest_of(data) != chosen.digest:
            raise UnknownEditError(
                f"the engine has no edit {chosen.name!r} as the request means it: it was removed, or another "
                "took its name, after the request was sent"
            )
        return data


def _read(data: bytes, model: WorkerModel, policy: Policy = TRUSTED) -> Info:
    """Decode an edit on a block's thread, since this runs its sender's code; DecodeError if it is invalid."""
    received = decode_trace(data, resolve=lambda place: place_named(model, *place), policy=policy)
    if len(received.blocks) != 1:
        raise DecodeError("an edit is one block")
    return received.blocks[0]


def _every_step(
    function: Callable[[], Any], model: WorkerModel, enter: Callable[[], None]
) -> Callable[[], None]:
    """Return what an edit's thread runs: ``enter``, then the edit once in each generation step."""

    def run() -> None:
        enter()
        with SAVES.outermost():  # so that values have a `save` method
            for _ in IteratorTracer(slice(None), model.interleaver):
                function()

    return run
