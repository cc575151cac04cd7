"""``DatasetWriter``: a thread that writes the rows of prompts, in order, while others are computed.

A driver announces each shard with ``begin`` and hands over its prompts with ``put``, in any order. Neither
blocks, and neither raises for what happens to the disk: the driver looks at ``progress().failure``. Memory
holds the prompts that are queued and those that wait for an earlier one; with the policy ``slow`` the driver
waits (``wait_for_room``) before it computes more, with ``drop`` the writer drops what is too much.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal, Self, TypedDict, get_args

import msgspec

from nnsight_engine.datasets.manifest import (
    MANIFEST,
    DatasetError,
    Manifest,
    SettingsError,
    ShardRecord,
    SinkTimeoutError,
)
from nnsight_engine.datasets.plan import ShardPlan
from nnsight_engine.datasets.shards import PromptRows, ShardWriter, record_of
from nnsight_engine.datasets.storage import (
    INDEX,
    RemoteStorage,
    Retries,
    Storage,
    open_storage,
    shard_name,
    sink_error,
)

Policy = Literal["slow", "drop"]

DEFAULT_PENDING_BYTES: Final = 2**30


class WriterError(DatasetError):
    """The driver handed over something that is not in its plan, or the writer failed for its own reason."""


class WriterOptions(TypedDict):
    """Keyword arguments of ``DatasetWriter``."""

    policy: Policy
    pending_limit_bytes: int
    spool: Path | None
    retries: Retries | None


def options_to_plain(options: WriterOptions) -> dict[str, Any]:
    """Return options as values that another process can receive."""
    spool = options["spool"]
    plain = {**options, "spool": None if spool is None else str(spool)}
    return {**plain, "retries": msgspec.to_builtins(options["retries"])}


def options_from_plain(plain: Mapping[str, Any]) -> WriterOptions:
    spool = plain["spool"]
    return WriterOptions(
        policy=plain["policy"],
        pending_limit_bytes=plain["pending_limit_bytes"],
        spool=None if spool is None else Path(spool),
        retries=msgspec.convert(plain["retries"], Retries | None),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
    """What this and earlier runs have written; pending bytes were handed over and are not written."""

    num_shards: int = 0
    num_prompts: int = 0
    num_rows: int = 0
    num_bytes: int = 0
    pending_bytes: int = 0
    num_dropped: int = 0
    failure: DatasetError | None = None


def record_in(storage: Storage, number: int) -> ShardRecord | None:
    """Return the record of a shard; None if it is not complete."""
    index = storage.read(f"{shard_name(number)}/{INDEX}")
    return None if index is None else record_of(index)


class DatasetWriter:
    """Writes one dataset, or the rest of it.

    Args:
        to: A folder, or a URL that fsspec opens.
        manifest: The dataset's settings; a dataset that is there already must have the same.
        policy: Whether ``put`` drops a prompt once ``pending_limit_bytes`` are pending, or the driver waits.
        pending_limit_bytes: See ``policy``.
        spool: For a URL, the folder where a shard waits for its upload; by default the user's cache.
        retries: For a URL.

    Raises:
        ManifestMismatchError: The folder has a dataset with other settings.
        DatasetBusyError: Another process writes it.
        SinkError: The manifest cannot be written.
        SettingsError: An argument has no such value.
    """

    def __init__(
        self,
        to: str | os.PathLike[str],
        manifest: Manifest,
        *,
        policy: Policy = "slow",
        pending_limit_bytes: int = DEFAULT_PENDING_BYTES,
        spool: Path | None = None,
        retries: Retries | None = None,
    ) -> None:
        if policy not in get_args(Policy) or pending_limit_bytes < 1:
            raise SettingsError(
                f"`policy` is slow or drop and `pending_limit_bytes` at least 1, got {policy!r} and "
                f"{pending_limit_bytes}"
            )
        self._storage = open_storage(to, spool=spool, retries=retries)
        self.policy = policy
        self._pending_limit_bytes = pending_limit_bytes
        self._changed = threading.Condition()
        self._queue: collections.deque[ShardPlan | PromptRows | int | None] = collections.deque()
        self._progress = Progress()
        self._is_closing = self._is_abandoned = False
        self._records: dict[int, ShardRecord] = {}
        self._shards = _ShardsInOrder(self._begin_file, self._finished)
        self._storage.lock()
        try:
            self._manifest = self._start_manifest(manifest)
        except BaseException:
            self._storage.close()
            raise
        self._thread = threading.Thread(target=self._run, name="dataset-writer", daemon=True)
        self._thread.start()

    def _start_manifest(self, manifest: Manifest) -> Manifest:
        """Return the manifest at the place, which must have our settings; write ours if there is none."""
        data = self._storage.read(MANIFEST)
        if data is None:
            self._storage.write(MANIFEST, manifest.encode())
            return manifest
        stored = Manifest.decode(data, self._storage.place)
        manifest.check_resumes(stored, self._storage.place)
        return stored

    @property
    def is_complete(self) -> bool:
        """Whether the dataset is finished, now or by an earlier run."""
        return self._manifest.state == "complete"

    @property
    def pending_bytes(self) -> int:
        return self._progress.pending_bytes

    @property
    def manifest(self) -> Manifest:
        return self._manifest

    def progress(self) -> Progress:
        return self._progress

    # By the driver, one thread at a time for each prompt.

    def completed(self, number: int) -> ShardRecord | None:
        """Return the record of a shard that an earlier run has completed, and count it; None if none has."""
        record = record_in(self._storage, number)
        if record is not None:
            self.count(record)
        return record

    def count(self, record: ShardRecord) -> None:
        """Count a shard that an earlier run has completed."""
        with self._changed:
            self._count(record)

    def begin(self, shard: ShardPlan) -> None:
        """Announce a shard, before its first prompt; shards come in order."""
        self._enqueue(shard, 0)

    def put(self, rows: PromptRows) -> None:
        """Hand over a prompt's rows; a second time is ignored."""
        self._enqueue(rows, rows.num_bytes)

    def drop(self, prompt: int) -> None:
        """Say that a prompt of a shard gets no rows; the shard's record lists it."""
        self._enqueue(prompt, 0)

    def _enqueue(self, item: ShardPlan | PromptRows | int, num_bytes: int) -> None:
        """Queue a shard's announcement, a prompt's rows, or the number of a prompt that is dropped.

        With the policy ``drop``, rows beyond the limit become such a number. After a failure all is ignored.
        """
        with self._changed:
            if self._progress.failure is not None or self._is_closing:
                return
            is_too_much = self._progress.pending_bytes + num_bytes > self._pending_limit_bytes
            if isinstance(item, PromptRows) and self.policy == "drop" and is_too_much:
                item, num_bytes = item.prompt, 0
            self._queue.append(item)
            self._add(pending_bytes=num_bytes)
            self._changed.notify_all()

    def wait_for_room(self, timeout_s: float | None = None) -> bool:
        """Wait for less than ``pending_limit_bytes`` to be pending, or a failure; False after the timeout."""
        with self._changed:
            return self._changed.wait_for(
                lambda: (
                    self._progress.pending_bytes < self._pending_limit_bytes
                    or self._progress.failure is not None
                ),
                timeout_s,
            )

    def close(self, *, complete: bool = True, timeout_s: float | None = None) -> Progress:
        """Write what is pending and the final manifest, and end the thread.

        Args:
            complete: Whether all shards were handed over; False leaves the dataset to be resumed, without
                what is pending.
            timeout_s: After that the failure is a SinkTimeoutError; None waits.
        """
        self.end(complete=complete)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            error = SinkTimeoutError(f"{self._storage.place} did not take everything in {timeout_s} s")
            self._fail(error)
            if isinstance(self._storage, RemoteStorage):
                self._storage.stopped.set()
        return self._progress

    def end(self, *, complete: bool) -> None:
        """Begin to close, without waiting; ``has_ended`` says when it is done."""
        with self._changed:
            self._is_closing = True
            self._is_abandoned = not complete
            self._changed.notify_all()
        if not complete and isinstance(self._storage, RemoteStorage):
            self._storage.stopped.set()

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(complete=kind is None)

    # By the writer's thread.

    def _run(self) -> None:
        """Write queued items in order, on the thread, until ``close`` is called or something fails."""
        try:
            while (item := self._next()) is not None:
                self._take(item)
                # While the loop waits for the next item, its variable must not keep the rows of this one.
                del item
            if not self._is_abandoned:
                self._complete()
        except Exception as error:  # noqa: BLE001 - whatever it is, the driver has to hear of it
            self._fail(error)
        finally:
            self._shards.abort()
            self._storage.close()

    def _next(self) -> ShardPlan | PromptRows | int | None:
        """Wait for an item and take it; None once the thread has to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._is_closing or self._progress.failure)
            if self._is_abandoned or not self._queue or self._progress.failure is not None:
                return None
            return self._queue.popleft()

    def _take(self, item: ShardPlan | PromptRows | int) -> None:
        """Write what can be written with this item; a prompt that was handed over before is ignored."""
        if isinstance(item, ShardPlan):
            self._shards.announce(item)
            return
        if self._shards.has(_number(item)):
            self._done(-_num_bytes(item))
            return
        for finished, num_written in self._shards.take(item):
            if isinstance(finished, PromptRows):
                self._done(
                    -finished.num_bytes,
                    num_prompts=1,
                    num_rows=len(finished.positions),
                    num_bytes=num_written,
                )
            else:
                self._done(0, num_prompts=1, num_dropped=1)

    def _done(self, pending_bytes: int, **changes: int) -> None:
        """Change the pending bytes and other fields of the progress; wake a driver that waits for room."""
        with self._changed:
            self._add(pending_bytes=pending_bytes, **changes)
            self._changed.notify_all()

    def _begin_file(self, shard: ShardPlan) -> ShardWriter:
        return ShardWriter(self._storage.new_shard(shard.number), self._manifest.rows)

    def _finished(self, record: ShardRecord) -> None:
        """Bring a complete shard to its place, and count it."""
        self._storage.publish(record.number)
        with self._changed:
            self._records[record.number] = record
            self._add(num_shards=1)

    def _complete(self) -> None:
        """Write the manifest of the complete dataset, unless an earlier run has."""
        if self.is_complete:
            return
        if self._shards.is_unfinished:
            raise WriterError(
                "the dataset was closed as complete, and prompts of a shard were not handed over"
            )
        records = [self._records[number] for number in sorted(self._records)]
        digest = hashlib.sha256("".join(record.digest for record in records).encode())
        manifest = msgspec.structs.replace(
            self._manifest,
            state="complete",
            num_prompts=sum(record.num_prompts for record in records),
            num_rows=sum(record.num_rows for record in records),
            digest=digest.hexdigest(),
            shards=records,
        )
        self._storage.write(MANIFEST, manifest.encode())
        self._manifest = manifest

    def _count(self, record: ShardRecord) -> None:
        """Count a shard of an earlier run in the progress, as if this run had written its rows."""
        if record.number in self._records:
            return
        self._records[record.number] = record
        self._add(
            num_shards=1,
            num_prompts=record.num_prompts,
            num_rows=record.num_rows,
            num_bytes=sum(file.bytes for name, file in record.files.items() if name != INDEX),
            num_dropped=len(record.dropped),
        )

    def _add(self, **changes: int) -> None:
        """Add to fields of the progress, with ``_changed`` held; readers see one object or the next."""
        progress = self._progress
        self._progress = dataclasses.replace(
            progress, **{name: getattr(progress, name) + change for name, change in changes.items()}
        )

    def _fail(self, error: Exception) -> None:
        """Keep the first failure for the driver to see, as a DatasetError, and give up what is queued."""
        if isinstance(error, DatasetError):
            failure: DatasetError = error
        elif isinstance(error, OSError):
            failure = sink_error(error, self._storage.place)
        else:
            failure = WriterError(f"the dataset's writer failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
        with self._changed:
            self._queue.clear()
            if self._progress.failure is None:
                self._progress = dataclasses.replace(self._progress, failure=failure, pending_bytes=0)
            self._changed.notify_all()


def _number(item: PromptRows | int) -> int:
    return item.prompt if isinstance(item, PromptRows) else item


def _num_bytes(item: PromptRows | int) -> int:
    return item.num_bytes if isinstance(item, PromptRows) else 0


class _ShardsInOrder:
    """Puts prompts into order and writes them into their shards; an ``int`` is a dropped prompt's number."""

    def __init__(
        self, begin: Callable[[ShardPlan], ShardWriter], finished: Callable[[ShardRecord], None]
    ) -> None:
        """``begin`` opens a shard's files, and ``finished`` gets the record of a complete shard."""
        self._begin = begin
        self._finished = finished
        self._announced: collections.deque[ShardPlan] = collections.deque()
        self._waiting: dict[int, PromptRows | int] = {}
        self._writer: ShardWriter | None = None
        self._next_prompt = 0
        self._dropped: list[int] = []

    @property
    def is_unfinished(self) -> bool:
        return bool(self._announced or self._waiting)

    def announce(self, shard: ShardPlan) -> None:
        if not self._announced:
            self._next_prompt = shard.first_prompt
        self._announced.append(shard)

    def has(self, prompt: int) -> bool:
        return prompt < self._next_prompt or prompt in self._waiting

    def take(self, item: PromptRows | int) -> Iterator[tuple[PromptRows | int, int]]:
        """Yield the prompts that are done with, and the bytes that were written for each."""
        prompt = _number(item)
        if not any(shard.first_prompt <= prompt < shard.end for shard in self._announced):
            raise WriterError(f"prompt {prompt} is of no shard that was announced")
        self._waiting[prompt] = item
        del item
        while self._announced and self._next_prompt in self._waiting:
            yield self._write(self._waiting.pop(self._next_prompt))
            self._finish_at_end()

    def _write(self, item: PromptRows | int) -> tuple[PromptRows | int, int]:
        """Write the next prompt in order; return it with the bytes written, 0 if it is dropped."""
        if self._writer is None:
            self._writer = self._begin(self._announced[0])
        self._next_prompt += 1
        if isinstance(item, PromptRows):
            return item, self._writer.append(item)
        self._dropped.append(item)
        return item, 0

    def _finish_at_end(self) -> None:
        """Complete the first announced shard if its last prompt has been written."""
        shard, writer = self._announced[0], self._writer
        if self._next_prompt < shard.end or writer is None:
            return
        record = writer.finish(
            number=shard.number,
            first_prompt=shard.first_prompt,
            num_prompts=shard.num_prompts,
            digest=shard.digest,
            dropped=self._dropped,
        )
        self._writer, self._dropped = None, []
        self._announced.popleft()
        if self._announced:
            self._next_prompt = self._announced[0].first_prompt
        self._finished(record)

    def abort(self) -> None:
        self._waiting.clear()
        if self._writer is not None:
            self._writer.abort()
