"""The weights of dictionaries: files of up to gigabytes, named by the SHA-256 of their content.

Several servers share database and folder without locks. A server adds a file *before* it commits a
dictionary and once more after that; it moves a file aside before it looks whether the database has its
hash, and moves it back if so: in the end each dictionary has its file. All disk access runs in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import re
import secrets
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO, Final

from api_schemas.errors import ErrorCode
from app.limits.limit import Holder, Spending
from app.storage.open_files import OpenFiles, OpenResult, ProcessFolder, append, claim_folder
from app.storage.quotas import StoredBytes, on_disk, sync_folder

logger = logging.getLogger(__name__)

ENDING: Final = ".safetensors"
_UPLOADS: Final = "uploads"
_ASIDE: Final = re.compile(r"(?P<hash>[0-9a-f]{64})\.removed-[0-9a-f]{16}")
_HASH: Final = re.compile(rf"(?P<hash>[0-9a-f]{{64}}){re.escape(ENDING)}")
_PART_BYTES: Final = 1 << 20
_AHEAD_S: Final = 300.0
_READS_AT_ONCE: Final = 2
"""Files that are read ahead at once; others of the server's threads stay free."""
_ORPHAN_S: Final = 3600.0
"""The age from which a file without a dictionary is removed; a younger one may be about to get one."""
_WEIGHTS: Final = "The weights"
_ONLY_FILE: Final = 0
"""The number of the file of a hash, in the keys of open files."""


class WeightsUpload:
    """``spending`` counts its bytes until they are counted as stored, or the file is removed."""

    def __init__(self, path: Path, spending: Spending) -> None:
        self.path = path
        self.num_bytes = 0
        self.spending = spending
        self._digest = hashlib.sha256()
        self._file: BinaryIO | None = None
        self._is_closed = False

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes; in a thread. ``dictionary_store_full``, or ``internal_error`` for a failed disk."""
        with on_disk(_WEIGHTS, ErrorCode.DICTIONARY_STORE_FULL):
            if self._file is None and not self._is_closed:
                self._file = self.path.open("xb", buffering=0)
            if self._file is not None:
                append(self._file, data, self._digest)
                self.num_bytes += len(data)

    def finish(self) -> None:
        """Sync the file to disk; in a thread. Raises the errors of ``write``."""
        with on_disk(_WEIGHTS, ErrorCode.DICTIONARY_STORE_FULL):
            if self._file is not None:
                os.fsync(self._file.fileno())

    async def discard(self) -> None:
        """Remove the file; a file added to the folder stays there."""
        self.spending.close()
        await asyncio.to_thread(self._remove)

    def _remove(self) -> None:
        self._is_closed = True
        if self._file is not None:
            self._file.close()
        self.path.unlink(missing_ok=True)


class DictionaryFiles:
    def __init__(self, directory: Path, space: StoredBytes) -> None:
        self.space = space
        self._directory = directory
        self._upload_folder: ProcessFolder | None = None
        self._open_files = OpenFiles()
        self._ahead: dict[str, tuple[float, asyncio.Task[None]]] = {}
        self._reading = asyncio.Semaphore(_READS_AT_ONCE)

    async def start(self) -> None:
        """Create the folder, and remove uploads of servers that died."""
        if self._upload_folder is None:
            await asyncio.to_thread(self._directory.mkdir, mode=0o700, parents=True, exist_ok=True)
            self._upload_folder = await asyncio.to_thread(claim_folder, self._directory / _UPLOADS)

    async def close(self) -> None:
        folder, self._upload_folder = self._upload_folder, None
        if folder is not None:
            await asyncio.to_thread(folder.release)

    @contextlib.asynccontextmanager
    async def receiving(self, holder: Holder) -> AsyncIterator[WeightsUpload]:
        """Yield an upload to a new file, which is removed at the end of the block."""
        if self._upload_folder is None:
            raise RuntimeError("the files must be started before they are used; call start()")
        upload = WeightsUpload(self._upload_folder.path / secrets.token_hex(16), self.space.spend(holder))
        try:
            yield upload
        finally:
            await upload.discard()

    def path(self, sha256: str) -> Path:
        return self._directory / f"{sha256}{ENDING}"

    async def add(self, upload: WeightsUpload) -> None:
        """Add finished weights to the folder, unless they are there; raises as ``write`` does."""
        with on_disk(_WEIGHTS, ErrorCode.DICTIONARY_STORE_FULL):
            await asyncio.to_thread(self._link, upload.path, upload.sha256)

    async def open(self, sha256: str, num_bytes: int, holder: Holder) -> OpenResult:
        """Open a file for ``holder``; ``rate_limit_exceeded`` for too many downloads, FileNotFoundError."""
        reading = self._open_files.register((sha256, _ONLY_FILE), holder, num_bytes)
        try:
            return OpenResult(await asyncio.to_thread(self.path(sha256).open, "rb"), reading)
        except BaseException:
            reading.close()
            raise

    async def read_ahead(self, sha256: str) -> None:
        """Read a file into the machine's memory: the engine loads it between two steps of all requests.

        A missing file is left to the engine, which reports it.
        """
        begun_s, reading = self._ahead.get(sha256, (0.0, None))
        if reading is None or (reading.done() and time.monotonic() - begun_s > _AHEAD_S):
            reading = asyncio.create_task(self._read(self.path(sha256)))
            self._ahead[sha256] = time.monotonic(), reading
        await asyncio.shield(reading)

    async def _read(self, path: Path) -> None:
        async with self._reading:
            with contextlib.suppress(OSError):
                await asyncio.to_thread(self._read_through, path)

    async def set_aside(self, sha256: str) -> Path | None:
        return await asyncio.to_thread(self._set_aside, sha256)

    async def bring_back(self, aside: Path) -> None:
        """Move a file back that was set aside, unless another of its hash has come meanwhile."""
        await asyncio.to_thread(self._link, aside, aside.name.partition(".")[0])
        await asyncio.to_thread(aside.unlink, missing_ok=True)

    async def remove(self, aside: Path) -> None:
        """Remove a file that was set aside; its bytes stay counted until its last reader has closed it."""
        self._open_files.keep_counted(self.space, aside.name.partition(".")[0])
        await asyncio.to_thread(aside.unlink, missing_ok=True)

    async def old_files(self) -> tuple[list[str], list[Path]]:
        """Return the hashes of files that have been there for long, and old files that are set aside."""
        return await asyncio.to_thread(self._old_files)

    @staticmethod
    def _read_through(path: Path) -> None:
        buffer = bytearray(_PART_BYTES)
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    def _link(self, source: Path, sha256: str) -> None:
        with contextlib.suppress(FileExistsError):
            self.path(sha256).hardlink_to(source)
            sync_folder(self._directory)

    def _set_aside(self, sha256: str) -> Path | None:
        """Rename a file so that no dictionary finds it, and return its path; None if it is gone."""
        self._ahead.pop(sha256, None)
        aside = self._directory / f"{sha256}.removed-{secrets.token_hex(8)}"
        try:
            self.path(sha256).rename(aside)
        except FileNotFoundError:
            return None
        return aside

    def _old_files(self) -> tuple[list[str], list[Path]]:
        hashes, aside = [], []
        for path in self._directory.iterdir():
            file_match, aside_match = _HASH.fullmatch(path.name), _ASIDE.fullmatch(path.name)
            with contextlib.suppress(FileNotFoundError):
                is_other = file_match is None and aside_match is None
                if is_other or path.stat().st_ctime > time.time() - _ORPHAN_S:
                    continue
                if file_match is not None:
                    hashes.append(file_match["hash"])
                else:
                    aside.append(path)
        return hashes, aside
