"""Stores large results as files that expire, so that captured tensors need not be embedded in JSON.

The store never exceeds its byte limit, nor a tenant its share: it evicts the oldest files, first those of the
tenant with the most bytes. Files with readers are not evicted, and stay counted. Ids are unguessable, and
only ids that the store created become a path. All disk access runs in threads. Files are written directly
from the tensors' bytes; safetensors' own writer takes raw memory addresses.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from api_schemas.errors import ApiError, ErrorCode
from app.limits.limit import Holder, Limit, Spending
from app.storage.open_files import OpenFiles, OpenResult, ProcessFolder, claim_folder
from app.storage.quotas import StoredBytes, StoredQuotas
from nnsight_engine.plans.collect.results import TensorResult

_DTYPES: Final = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
}
_ALIGNMENT: Final = 8
_LENGTH_BYTES: Final = 8


def layout(tensors: Mapping[str, TensorResult]) -> tuple[bytes, list[str]]:
    """Return a safetensors file's bytes before its data, and its order of keys.

    Raises ValueError for a wrong dtype or shape.
    """
    # Wide types first, so that every tensor starts at a multiple of its item size.
    order = sorted(tensors, key=lambda key: (-_code_and_size(tensors[key])[1], key))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for key in order:
        tensor = tensors[key]
        code, _ = _code_and_size(tensor)
        stop = offset + len(tensor.data)
        header[key] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text, order


def write(path: Path, head: bytes, tensors: Mapping[str, TensorResult], order: list[str]) -> None:
    """Write a file atomically; ``head`` and ``order`` come from ``layout``."""
    partial = path.with_suffix(".partial")
    try:
        with partial.open("xb") as file:
            file.write(head)
            for key in order:
                file.write(tensors[key].data)
        partial.rename(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _code_and_size(tensor: TensorResult) -> tuple[str, int]:
    """Return the name of a tensor's dtype in files and its bytes; ValueError for a wrong dtype or shape."""
    code_and_bytes = _DTYPES.get(tensor.dtype)
    if code_and_bytes is None:
        raise ValueError(f"a stored tensor's dtype must be one of {', '.join(_DTYPES)}, got {tensor.dtype!r}")
    num_bytes = code_and_bytes[1]
    for size in tensor.shape:
        num_bytes *= size
    if num_bytes != len(tensor.data):
        raise ValueError(
            f"a {tensor.dtype} tensor of shape {tensor.shape} has {num_bytes} bytes, got {len(tensor.data)}"
        )
    return code_and_bytes


logger = logging.getLogger(__name__)

_ID_BYTES: Final = 24
_MAX_SWEEP_S: Final = 30.0
_ONLY_FILE: Final = 0
"""The number of a result's file, in the keys of open files."""


@dataclasses.dataclass(frozen=True, slots=True)
class StoredResult:
    id: str
    num_bytes: int
    expires_at: float
    spending: Spending

    @property
    def holder(self) -> Holder:
        return self.spending.holder

    @property
    def file_key(self) -> tuple[str, int]:
        return self.id, _ONLY_FILE


class ResultStore:
    """Its ``directory`` is shared by all server processes of this user, and not accessed before ``start``.

    ``replica`` is the prefix of ids, by which a replica finds the one that has a result.
    """

    def __init__(
        self,
        directory: Path,
        *,
        ttl_s: float,
        limit: Limit,
        clock: Callable[[], float] | None = None,
        replica: str = "",
    ) -> None:
        self._prefix = f"{replica}." if replica else ""
        self._directory = directory
        self._ttl_s = ttl_s
        self._clock = clock or steady_time()
        self._folder: ProcessFolder | None = None
        self._entries: dict[str, StoredResult] = {}
        self._open_files = OpenFiles()
        self.quotas = StoredQuotas()
        self._space = StoredBytes(limit, self.quotas)
        self._writes: set[asyncio.Task[StoredResult]] = set()
        self._sweeper: asyncio.Task[None] | None = None

    @property
    def used_bytes(self) -> int:
        return self._space.used()

    async def start(self) -> None:
        """Create this process's folder, remove those of dead processes, and start to expire files."""
        if self._folder is not None:
            return
        self._folder = await asyncio.to_thread(claim_folder, self._directory)
        self._sweeper = asyncio.create_task(self._sweep(), name="result-store-sweep")

    async def close(self) -> None:
        """Remove all files; nothing can be opened afterwards."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
        await asyncio.gather(*self._writes, return_exceptions=True)
        folder = self._folder
        self._forget(list(self._entries.values()))
        self._folder, self._sweeper = None, None
        if folder is not None:
            await asyncio.to_thread(folder.release)

    async def put(self, tensors: Mapping[str, TensorResult], owner: str, key_id: str = "") -> StoredResult:
        """Store tensors in one file of a tenant, and evict the oldest files if necessary.

        Raises:
            ApiError: ``capture_too_large`` (beyond the limit of the store or of a tenant in it),
                ``stored_bytes_full`` (beyond the limit of the tenant or of the key), ``engine_capture_full``
                (no room now: other files are being written or read, or the disk refuses).
        """
        task = asyncio.create_task(self._put(tensors, Holder(owner, key_id)))
        self._writes.add(task)
        task.add_done_callback(self._writes.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            # No client will receive the id, so the file is removed as soon as it is written.
            task.add_done_callback(self._abandon)
            raise

    async def open(self, result_id: str, owner: str) -> OpenResult:
        """Open a stored file; ``result_not_found`` does not tell unknown, expired and others' ids apart."""
        entry = self._entries.get(result_id)
        if entry is not None and entry.holder.tenant != owner:
            entry = None
        if entry is not None and entry.expires_at <= self._clock():
            await asyncio.to_thread(_unlink, self._forget([entry]))
            entry = None
        if entry is None:
            raise _not_found()
        reading = self._open_files.register(entry.file_key, entry.holder, entry.num_bytes)
        try:
            file = await asyncio.to_thread(self._path(result_id).open, "rb")
        except BaseException as error:
            reading.close()
            if not isinstance(error, FileNotFoundError):
                raise
            raise _not_found() from error
        return OpenResult(file, reading)

    async def _put(self, tensors: Mapping[str, TensorResult], holder: Holder) -> StoredResult:
        """Write a file beside those that stay, and list it; the errors are those of ``put``."""
        head, order = layout(tensors)
        num_bytes = len(head) + sum(len(tensor.data) for tensor in tensors.values())
        evicted = self._evict(num_bytes, holder)
        spending = self._space.spend(holder)
        spending.add(num_bytes, may_exceed=True)  # there is room once the files are removed
        result_id = f"{self._prefix}{secrets.token_urlsafe(_ID_BYTES)}"
        try:
            await asyncio.to_thread(_unlink, evicted)
            await asyncio.to_thread(write, self._path(result_id), head, tensors, order)
        except BaseException as error:
            spending.close()
            if not isinstance(error, OSError):
                raise
            logger.exception("a result of %d bytes could not be written", num_bytes)
            raise ApiError(
                ErrorCode.ENGINE_CAPTURE_FULL,
                f"The server could not store a result of {num_bytes} bytes; "
                "capture fewer points or positions, or send the request again later.",
            ) from error
        entry = StoredResult(result_id, num_bytes, self._clock() + self._ttl_s, spending)
        self._entries[result_id] = entry
        return entry

    def _evict(self, num_bytes: int, holder: Holder) -> list[Path]:
        """Return the files to remove for ``num_bytes`` more, whose own bytes are no longer counted."""
        space = self._space
        most = space.most(holder.tenant)
        if num_bytes > most:
            raise ApiError(
                ErrorCode.CAPTURE_TOO_LARGE,
                f"A stored result may have {most} bytes, this one has {num_bytes}; "
                "capture fewer points or positions, or use 'reduce'.",
            )
        # Evicting a file that is being read would free nothing now.
        eviction = _Eviction(
            entry for entry in self._entries.values() if not self._open_files.is_open(entry.file_key)
        )
        for name in holder.names:
            if not eviction.add(self.quotas.excess(name, num_bytes), name):
                raise self.quotas.exceeded(name, self.quotas.most(name), self.quotas.used(name), num_bytes)
        if not all(
            eviction.add(space.used(name) + num_bytes - space.most(name), name)
            for name in dict.fromkeys((holder.tenant, ""))
        ):
            raise ApiError(
                ErrorCode.ENGINE_CAPTURE_FULL,
                f"The result store (limit {most} bytes) has no room for {num_bytes} bytes while "
                "other results are being written or read; send the request again later.",
            )
        return self._forget(eviction.entries)

    def _forget(self, entries: Iterable[StoredResult]) -> list[Path]:
        """Drop entries, and return their paths; bytes stay counted until the readers have closed them."""
        gone = [entry for entry in entries if self._entries.pop(entry.id, None) is not None]
        for entry in gone:
            self._open_files.when_closed(entry.file_key, entry.spending.close)
        return [self._path(entry.id) for entry in gone]

    async def _sweep(self) -> None:
        interval_s = min(_MAX_SWEEP_S, max(0.05, self._ttl_s / 4))
        while True:
            await asyncio.sleep(interval_s)
            now = self._clock()
            expired = [entry for entry in self._entries.values() if entry.expires_at <= now]
            await asyncio.to_thread(_unlink, self._forget(expired))

    def _abandon(self, task: asyncio.Task[StoredResult]) -> None:
        """Remove the file of a write that has succeeded, and that nobody waits for any more."""
        if task.cancelled() or task.exception() is not None:
            return
        asyncio.get_running_loop().run_in_executor(None, _unlink, self._forget([task.result()]))

    def _path(self, result_id: str) -> Path:
        if self._folder is None:
            raise RuntimeError("the result store must be started before it is used; call start()")
        return self._folder.path / f"{result_id}.safetensors"


class _Eviction:
    """Files to evict so that a new one fits, chosen from ``entries``, oldest first, before any is removed."""

    def __init__(self, entries: Iterable[StoredResult]) -> None:
        self.entries: list[StoredResult] = []
        self._remaining: dict[str, list[StoredResult]] = defaultdict(list)
        for entry in reversed(list(entries)):  # the oldest comes last
            self._remaining[entry.holder.tenant].append(entry)

    def add(self, num_bytes: int, name: str) -> bool:
        """Select files until ``num_bytes`` are freed; False if they do not suffice.

        ``name`` is one of ``Holder.names``, or empty for any, starting with the tenant that has the most.
        """
        freed = sum(entry.num_bytes for entry in self.entries if not name or name in entry.holder.names)
        while freed < num_bytes:
            entry = self._oldest_of(name) if name else self._oldest()
            if entry is None:
                return False
            self._remaining[entry.holder.tenant].remove(entry)
            self.entries.append(entry)
            freed += entry.num_bytes
        return True

    def _oldest(self) -> StoredResult | None:
        """Return the oldest file of the tenant with the most bytes; None if there are no files."""
        largest = max(
            self._remaining.values(),
            key=lambda entries: sum(entry.num_bytes for entry in entries),
            default=None,
        )
        return largest[-1] if largest else None

    def _oldest_of(self, name: str) -> StoredResult | None:
        candidates = (entry for entries in self._remaining.values() for entry in reversed(entries))
        return next((entry for entry in candidates if name in entry.holder.names), None)


def steady_time() -> Callable[[], float]:
    """Return a clock with the current Unix time that does not jump when the system clock is set."""
    offset_s = time.time() - time.monotonic()
    return lambda: offset_s + time.monotonic()


def _not_found() -> ApiError:
    return ApiError(
        ErrorCode.RESULT_NOT_FOUND,
        "No result has this id; results expire (see 'expires_at' beside the url) and may go earlier "
        "when the store is full. Send the request again.",
    )


def _unlink(paths: list[Path]) -> None:
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError:
            # It is dropped from the index, so it is never served; the folder is removed when the server
            # stops.
            logger.warning("a stored result could not be removed: %s", path, exc_info=True)
