"""Edits in the engine: blocks that run beside the blocks of requests that choose them.

An edit is kept as the bytes it came as, and read anew for each request that chooses it, so that no request
ever sees what another has made of its variables. It runs before the request's own block, once for every step,
on the request's rows. Named ones stay in the worker until they are removed; one without a name comes with the
request.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from nnsight_engine.core.saves import SAVES
from nnsight_engine.interleaving.iteration import IteratorTracer
from nnsight_engine.serialization import TRUSTED, DecodeError, Policy, decode_trace
from nnsight_engine.tracing.tracer import Info, compiled
from nnsight_engine.vllm_backend.traces.errors import EditLimitError, UnknownEditError
from nnsight_engine.vllm_backend.traces.points import place_named
from nnsight_engine.vllm_backend.traces.points_edits import EditMediator

if TYPE_CHECKING:
    from nnsight_engine.interleaving.threads import ThreadMediator, Threads
    from nnsight_engine.vllm_backend.traces.entry import EditEntry, TraceEntry
    from nnsight_engine.vllm_backend.traces.model import WorkerModel


def digest_of(data: bytes) -> str:
    """Return what tells one edit's block from another's."""
    return hashlib.sha256(data).hexdigest()


class KeptEdits:
    """The edits that a worker keeps, by name.

    Args:
        max_edits: How many there may be.
        max_bytes: What they may have together.
    """

    def __init__(self, max_edits: int, max_bytes: int) -> None:
        """Start without any."""
        self._max_edits = max_edits
        self._max_bytes = max_bytes
        self._data: dict[str, bytes] = {}

    @property
    def num_kept(self) -> int:
        """How many there are."""
        return len(self._data)

    def keep(self, name: str, data: bytes, model: WorkerModel, threads: Threads) -> None:
        """Keep an edit, once it has been read without an error.

        Raises:
            EditLimitError: There are too many, or too large ones.
            DecodeError: It cannot be read.
        """
        others = {other: kept for other, kept in self._data.items() if other != name}
        num_bytes = sum(map(len, others.values())) + len(data)
        if len(others) >= self._max_edits or num_bytes > self._max_bytes:
            raise EditLimitError.over(name, len(others) + 1, self._max_edits, num_bytes, self._max_bytes)
        threads.run(lambda: _read(data, model))
        self._data[name] = data

    def remove(self, name: str) -> None:
        """Forget an edit; requests that run it go on."""
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
        """Return what runs the edits that a request chose, in order.

        Args:
            entry: The request.
            choice: Which of its ``n``.
            model: What ``model`` is in the edits.
            threads: What they run on.
            enter: Called on each one's thread before it runs.
            policy: What they may do.

        Raises:
            UnknownEditError: One of them is not here.
        """
        made: list[ThreadMediator] = []
        for number, chosen in enumerate(entry.edits):
            data = self._chosen(chosen)
            info: Info = threads.run(lambda data=data: _read(data, model, policy))  # type: ignore[misc] # a default
            run = _every_step(compiled(info, info.variables), model, enter)
            seed = zlib.crc32(f"{entry.key}/{entry.index}/{choice}/{number}".encode())
            label = f"the edit {chosen.name!r}"
            made.append(EditMediator(run, info, threads, seed=seed, label=label))
        return made

    def filled_in(self, entry: TraceEntry) -> TraceEntry:
        """Return a request that brings all edits it chose, those that are kept here too.

        Raises:
            UnknownEditError: One of them is not here.
        """
        if not entry.edits:
            return entry
        brought = [msgspec.structs.replace(chosen, data=self._chosen(chosen)) for chosen in entry.edits]
        return msgspec.structs.replace(entry, edits=brought)

    def _chosen(self, chosen: EditEntry) -> bytes:
        data = chosen.data if chosen.data is not None else self._data.get(chosen.name)
        if data is None or digest_of(data) != chosen.digest:
            raise UnknownEditError(
                f"the engine has no edit {chosen.name!r} as the request means it: it was removed, or another "
                "took its name, after the request was sent"
            )
        return data


def _read(data: bytes, model: WorkerModel, policy: Policy = TRUSTED) -> Info:
    received = decode_trace(data, resolve=lambda place: place_named(model, *place), policy=policy)
    if len(received.blocks) != 1:
        raise DecodeError("an edit is one block")
    return received.blocks[0]


def _every_step(
    function: Callable[[], Any], model: WorkerModel, enter: Callable[[], None]
) -> Callable[[], None]:
    """Return a function that runs an edit's block once for each step."""

    def run() -> None:
        enter()
        SAVES.enter()  # values have a `save` in any trace; the marks end with the thread
        for _ in IteratorTracer(slice(None), model.interleaver):
            function()

    return run
