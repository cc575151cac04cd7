"""The files of one shard: rows of each point as safetensors, and the index of the rows.

A safetensors file begins with the length of its header. Here the header is padded with spaces, as the format
permits, to ``HEADER_BYTES``: rows are appended behind that region as they come, and the header is written at
the end. The index is written last and has the shard's record in its metadata, so a shard is complete exactly
if its index exists.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from nnsight_engine.datasets.manifest import Dtype, FileRecord, Point, RowSettings, ShardRecord
from nnsight_engine.datasets.storage import INDEX, PARTIAL, sync_folder, write_durably

HEADER_BYTES: Final = 4096
INDEX_COLUMNS: Final = ("prompt", "position", "token")

_LENGTH_BYTES: Final = 8
_INDEX_ROW_BYTES: Final = 16
"""Prompt, position and token of a row, before compression."""
_RECORD: Final = b"nnsight_engine.shard"
_FILE_DTYPES: Final = {"float32": "F32", "bfloat16": "BF16", "int8": "I8"}
_MAX_INT8: Final = 127
_ALIGNMENT: Final = 4
_BUFFER_BYTES: Final = 2**20
_APART_BYTES: Final = 2**18
"""From here on a checksum is computed while the same bytes are written; less is not worth a thread's turn."""
_WRITEBACK_BYTES: Final = 2**25
_LEAST_SCALE: Final = 1e-30
_CRC_POLYNOMIAL: Final = 0xEDB88320

Values = torch.Tensor | npt.NDArray[Any]
Integers = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True, slots=True)
class PromptRows:
    """All rows of one prompt: ``values`` has ``[rows, width]`` by point, in the order of ``positions``.

    Tensors may be on any device, in any float dtype, and views; nothing may change them afterwards.
    """

    prompt: int
    positions: Integers
    tokens: Integers
    values: Mapping[str, Values]
    scores: Mapping[str, Floats] = dataclasses.field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return sum(value.nbytes for value in self.values.values()) + _INDEX_ROW_BYTES * len(self.positions)


def file_name(point: str) -> str:
    return f"{point}.safetensors"


class PointFile:
    """Appends the rows of one point to a partial file, which gets its header and its name in ``finish``."""

    def __init__(self, folder: Path, point: Point, dtype: Dtype, checksums: ThreadPoolExecutor) -> None:
        """Open a partial file behind the header's region; ``checksums`` is the thread for CRCs."""
        self._path = folder / file_name(point.name)
        self._partial = self._path.with_name(self._path.name + PARTIAL)
        self._width = point.width
        self._dtype = dtype
        self._scales: list[bytes] = []
        self._checksums = checksums
        self._num_rows = self._num_bytes = self._num_flushed = self._crc = 0
        self._file = self._partial.open("wb", buffering=_BUFFER_BYTES)
        self._file.seek(HEADER_BYTES)

    def append(self, values: Values) -> int:
        """Append ``[rows, width]`` and return the bytes written."""
        # Copied: what was received may be read-only, which torch does not know.
        tensor = torch.from_numpy(np.array(values)) if isinstance(values, np.ndarray) else values.detach()
        if tensor.ndim != 2 or tensor.shape[1] != self._width:
            raise ValueError(f"{self._path.stem} has rows of {self._width} numbers, got {list(tensor.shape)}")
        tensor = tensor.cpu()
        self._num_rows += len(tensor)
        if self._dtype == "float32":
            return self._write(tensor.float().contiguous().numpy())
        if self._dtype == "bfloat16":
            return self._write(tensor.to(torch.bfloat16).contiguous().view(torch.int16).numpy())
        rows, scales = quantized(tensor.float())
        self._scales.append(scales.numpy().tobytes())
        return self._write(rows.numpy()) + scales.nbytes

    def _write(self, array: npt.NDArray[Any]) -> int:
        return self._write_bytes(array.data.cast("B") if array.size else b"")

    def _write_bytes(self, data: memoryview | bytes) -> int:
        """Append bytes and update their CRC, for many of them on another thread meanwhile."""
        if len(data) < _APART_BYTES:
            self._crc = zlib.crc32(data, self._crc)
            self._file.write(data)
        else:
            crc = self._checksums.submit(zlib.crc32, data, self._crc)
            self._file.write(data)
            self._crc = crc.result()
        self._num_bytes += len(data)
        if self._num_bytes - self._num_flushed >= _WRITEBACK_BYTES:
            self._start_writeback()
        return len(data)

    def _start_writeback(self) -> None:
        # Linux begins to write pages that are not needed, so that the disk works beside us, not after us.
        self._file.flush()
        count, start = self._num_bytes - self._num_flushed, HEADER_BYTES + self._num_flushed
        os.posix_fadvise(self._file.fileno(), start, count, os.POSIX_FADV_DONTNEED)
        self._num_flushed = self._num_bytes

    def finish(self) -> FileRecord:
        """Write the scales behind the rows and the header before them, sync, and give the file its name."""
        tensors = {"rows": self._entry(_FILE_DTYPES[self._dtype], [self._num_rows, self._width], 0)}
        if self._dtype == "int8":
            start, padding = self._num_bytes, -self._num_bytes % _ALIGNMENT
            if padding:
                self._write_bytes(bytes(padding))
                tensors["padding"] = self._entry("U8", [padding], start)
            start = self._num_bytes
            self._write_bytes(b"".join(self._scales))
            tensors["scales"] = self._entry("F32", [self._num_rows], start)
        text = json.dumps(tensors, separators=(",", ":")).encode()
        header_text_bytes = HEADER_BYTES - _LENGTH_BYTES
        header = header_text_bytes.to_bytes(_LENGTH_BYTES, "little") + text.ljust(header_text_bytes)
        self._file.seek(0)
        self._file.write(header)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._partial.replace(self._path)
        crc = crc32_combine(zlib.crc32(header), self._crc, self._num_bytes)
        return FileRecord(HEADER_BYTES + self._num_bytes, f"{crc:08x}")

    def _entry(self, dtype: str, shape: list[int], start: int) -> dict[str, Any]:
        return {"dtype": dtype, "shape": shape, "data_offsets": [start, self._num_bytes]}

    def abort(self) -> None:
        with contextlib.suppress(OSError):  # writing what is buffered may fail as before
            self._file.close()


def quantized(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float32 rows as int8, and each row's scale; a row with NaN or infinity has such a scale."""
    if not rows.numel():
        return rows.to(torch.int8), torch.zeros(len(rows))
    scales = rows.abs().amax(1) / _MAX_INT8  # three times as fast as aminmax
    if bool(((scales > _LEAST_SCALE) & scales.isfinite()).all()):
        return (rows / scales[:, None]).round_().to(torch.int8), scales
    scaled = (rows / scales.where(scales != 0, 1.0)[:, None]).round_()
    return scaled.nan_to_num_(0.0).clamp_(-_MAX_INT8, _MAX_INT8).to(torch.int8), scales


class ShardWriter:
    """Writes a shard, a prompt after the other."""

    def __init__(self, folder: Path, settings: RowSettings) -> None:
        self._folder = folder
        self._settings = settings
        self._checksums = ThreadPoolExecutor(1, "dataset-checksums")
        self._files = {
            point.name: PointFile(folder, point, settings.dtype, self._checksums) for point in settings.points
        }
        self._columns: dict[str, list[npt.NDArray[Any]]] = {
            name: [] for name in (*INDEX_COLUMNS, *settings.scores)
        }
        self.num_rows = 0

    def append(self, rows: PromptRows) -> int:
        """Append a prompt's rows at all points and return the bytes written."""
        num_rows = len(rows.positions)
        sizes = {len(rows.tokens), *map(len, rows.values.values()), *map(len, rows.scores.values())}
        if sizes - {num_rows} or rows.values.keys() != self._files.keys():
            raise ValueError(
                f"prompt {rows.prompt} needs {num_rows} rows at each of {', '.join(self._files)}, got "
                f"{ {name: len(value) for name, value in rows.values.items()} }"
            )
        written = sum(file.append(rows.values[name]) for name, file in self._files.items())
        self._columns["prompt"].append(np.full(num_rows, rows.prompt, np.int64))
        self._columns["position"].append(np.asarray(rows.positions, np.int32))
        self._columns["token"].append(np.asarray(rows.tokens, np.int32))
        for name in self._settings.scores:
            self._columns[name].append(np.asarray(rows.scores[name], np.float32))
        self.num_rows += num_rows
        return written

    def finish(
        self, *, number: int, first_prompt: int, num_prompts: int, digest: str, dropped: Sequence[int]
    ) -> ShardRecord:
        """Complete all files, the index last, and return the shard's record."""
        files = {file_name(name): file.finish() for name, file in self._files.items()}
        self._checksums.shutdown()
        sync_folder(self._folder)
        record = ShardRecord(number, first_prompt, num_prompts, self.num_rows, digest, list(dropped), files)
        data = self._index(record)
        write_durably(self._folder / INDEX, data)
        return with_index(record, data)

    def _index(self, record: ShardRecord) -> bytes:
        """Return the Parquet file of the index, whose metadata has the shard's record for ``record_of``."""
        types = {"prompt": pa.int64(), "position": pa.int32(), "token": pa.int32()}
        columns = {
            name: pa.array(np.concatenate(arrays) if arrays else np.zeros(0), types.get(name, pa.float32()))
            for name, arrays in self._columns.items()
        }
        table = pa.table(columns).replace_schema_metadata({_RECORD: msgspec.json.encode(record)})
        data = io.BytesIO()
        pq.write_table(table, data, compression="zstd")
        return data.getvalue()

    def abort(self) -> None:
        self._checksums.shutdown()
        for file in self._files.values():
            file.abort()


def with_index(record: ShardRecord, index: bytes) -> ShardRecord:
    """Return a record with the index, which cannot have its own checksum in its metadata."""
    index_file = FileRecord(len(index), f"{zlib.crc32(index):08x}")
    return msgspec.structs.replace(record, files={**record.files, INDEX: index_file})


def record_of(index: bytes) -> ShardRecord | None:
    """Return a shard's record from the bytes of its index; None if these are not whole."""
    try:
        metadata = pq.read_schema(pa.BufferReader(index)).metadata or {}
        record = msgspec.json.decode(metadata[_RECORD], type=ShardRecord)
    except (pa.ArrowInvalid, KeyError, msgspec.DecodeError):
        return None
    return with_index(record, index)


def crc32_combine(first_crc: int, second_crc: int, second_bytes: int) -> int:
    """Return the CRC-32 of two parts after each other from the CRC of each, as zlib's function does.

    The first CRC is advanced over ``second_bytes`` zero bytes, by powers of the matrix that appends one.
    """
    power, operator = second_bytes, _advance_by_byte()
    while power:
        if power & 1:
            first_crc = _applied(operator, first_crc)
        operator = [_applied(operator, column) for column in operator]
        power >>= 1
    return first_crc ^ second_crc


def _advance_by_byte() -> list[int]:
    """Return the matrix over GF(2), by columns, that appends a zero byte to a CRC."""
    columns = []
    for bit in range(32):
        value = 1 << bit
        for _ in range(8):
            value = (value >> 1) ^ (_CRC_POLYNOMIAL if value & 1 else 0)
        columns.append(value)
    return columns


def _applied(matrix: Sequence[int], vector: int) -> int:
    """Multiply a matrix over GF(2) with a vector; both have bits of integers as their numbers."""
    total = 0
    for column in matrix:
        if not vector:
            break
        if vector & 1:
            total ^= column
        vector >>= 1
    return total
