"""Reading a dataset: rows of a point by number, and batches for training in PyTorch."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import fsspec
import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
import torch
from torch.utils.data import IterableDataset, get_worker_info

from nnsight_engine.datasets.manifest import (
    MANIFEST,
    IncompleteDatasetError,
    Manifest,
    Point,
    SettingsError,
    ShardRecord,
)
from nnsight_engine.datasets.shards import INDEX_COLUMNS, file_name
from nnsight_engine.datasets.storage import INDEX, LocalStorage, open_storage, shard_name

Numbers = npt.NDArray[np.int64]
Batch = dict[str, torch.Tensor]

_DTYPES: Final = {
    "F32": (np.float32, torch.float32),
    "BF16": (np.int16, torch.bfloat16),
    "I8": (np.int8, torch.int8),
}
_LENGTH_BYTES: Final = 8
"""A safetensors file begins with the length of its header."""


def load(source: str | os.PathLike[str], *, cache: Path | None = None) -> ActivationDataset:
    """Open a dataset at a path or a URL that fsspec opens.

    Args:
        source: The folder with ``manifest.json``.
        cache: Where the files of a URL are kept once they are read; by default a folder that goes with the
            dataset.

    Raises:
        IncompleteDatasetError: There is no dataset, or it was not finished; repeat its harvest to finish it.
        SinkError: The URL cannot be read.
    """
    storage = open_storage(source)
    data = storage.read(MANIFEST)
    if data is None:
        raise IncompleteDatasetError(f"{storage.place} has no {MANIFEST}, so it is no dataset")
    manifest = Manifest.decode(data, storage.place)
    if manifest.state != "complete":
        raise IncompleteDatasetError(
            f"the dataset at {storage.place} is not complete: repeat the harvest with the same settings"
        )
    if isinstance(storage, LocalStorage):
        return ActivationDataset(manifest, _Files(storage.folder))
    return ActivationDataset(manifest, _Files(cache, storage.place))


class _Files:
    """Files of a dataset by name, as paths; those of a URL are copied when they are first needed."""

    def __init__(self, folder: Path | None, url: str | None = None) -> None:
        self._temporary = None if folder else tempfile.TemporaryDirectory(prefix="nnsight-engine-dataset-")
        self._folder = Path(self._temporary.name) if self._temporary else Path(folder or "")
        self._url = url

    def path(self, name: str) -> Path:
        """Return a file's path; a file of a URL is copied first, and gets its name when it is whole."""
        path = self._folder / name
        if self._url is not None and not path.is_file():
            filesystem, root = fsspec.core.url_to_fs(self._url)
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f"{path.name}.{os.getpid()}")
            filesystem.get_file(f"{root.rstrip('/')}/{name}", str(partial))
            partial.replace(path)
        return path

    def __getstate__(self) -> dict[str, Any]:
        # Workers of a DataLoader read the folder of the process that they serve, which removes it.
        return {"_temporary": None, "_folder": self._folder, "_url": self._url}


@dataclasses.dataclass(frozen=True, slots=True)
class ShardRows:
    """The rows of one point in one shard: ``data`` is memory-mapped, ``scales`` is for int8 alone."""

    data: torch.Tensor
    scales: torch.Tensor | None = None

    def read(self, rows: slice | Numbers) -> torch.Tensor:
        """Return a copy of rows: int8 ones scaled to float32, others in the dtype of the file."""
        chosen = rows if isinstance(rows, slice) else torch.from_numpy(rows)
        data = self.data[chosen]
        if self.scales is not None:
            return data.float() * self.scales[chosen][:, None]
        return data.clone() if isinstance(rows, slice) else data


def map_rows(path: Path) -> ShardRows:
    """Map a shard's file of a point: 8 bytes of header size, a JSON header, then ``rows`` and ``scales``."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        header: dict[str, Any] = json.loads(file.read(header_bytes))

    def mapped(name: str) -> torch.Tensor:
        entry = header[name]
        stored, dtype = _DTYPES[entry["dtype"]]
        shape = tuple(entry["shape"])
        if 0 in shape:
            return torch.zeros(shape, dtype=dtype)
        # Copy on write, because torch warns about arrays that cannot be written.
        array = np.memmap(path, stored, "c", _LENGTH_BYTES + header_bytes + entry["data_offsets"][0], shape)
        return torch.from_numpy(array).view(dtype)

    return ShardRows(mapped("rows"), mapped("scales") if "scales" in header else None)


class PointRows:
    """All rows of a point, in the order of the prompts, over all shards."""

    def __init__(self, dataset: ActivationDataset, point: Point) -> None:
        self.point = point
        self._dataset = dataset
        self._mapped: dict[int, ShardRows] = {}

    def shard(self, number: int) -> ShardRows:
        """Return one shard's rows, mapped into memory."""
        if number not in self._mapped:
            self._mapped[number] = map_rows(self._dataset.path(number, file_name(self.point.name)))
        return self._mapped[number]

    def __len__(self) -> int:
        return self._dataset.num_rows

    def __getitem__(self, rows: Any) -> torch.Tensor:
        """Return a row for a number, rows for a slice or an array of numbers; int8 becomes float32."""
        if isinstance(rows, slice):
            return self.read(np.arange(*rows.indices(len(self))))
        numbers = np.asarray(rows, np.int64)
        if numbers.size and not -len(self) <= numbers.min() <= numbers.max() < len(self):
            raise IndexError(f"rows run from 0 to {len(self) - 1}, got {rows}")
        values = self.read(np.atleast_1d(np.where(numbers < 0, numbers + len(self), numbers)))
        return values if numbers.ndim else values[0]

    def read(self, numbers: Numbers) -> torch.Tensor:
        """Return rows by their numbers in the dataset, ``[n, width]``, with one read of each shard."""
        first_rows = self._dataset.starts
        shards = np.searchsorted(first_rows, numbers, side="right") - 1
        dtype = torch.bfloat16 if self._dataset.manifest.rows.dtype == "bfloat16" else torch.float32
        values = torch.empty(len(numbers), self.point.width, dtype=dtype)
        for shard in np.unique(shards):
            indexes = np.flatnonzero(shards == shard)
            values[torch.from_numpy(indexes)] = self.shard(int(shard)).read(
                numbers[indexes] - first_rows[shard]
            )
        return values

    def __getstate__(self) -> dict[str, Any]:
        return {"point": self.point, "_dataset": self._dataset, "_mapped": {}}


class ActivationDataset:
    """A dataset that is complete.

    Attributes:
        manifest: Its settings, and the rows, bytes and checksums of its shards.
        starts: The number of the first row of each shard.
    """

    def __init__(self, manifest: Manifest, files: _Files) -> None:
        self.manifest = manifest
        self._files = files
        counts = [shard.num_rows for shard in manifest.shards]
        self.starts: Numbers = np.cumsum([0, *counts[:-1]], dtype=np.int64)

    @property
    def num_rows(self) -> int:
        return self.manifest.num_rows

    @property
    def points(self) -> list[str]:
        return [point.name for point in self.manifest.rows.points]

    @property
    def shards(self) -> list[ShardRecord]:
        return self.manifest.shards

    def path(self, shard: int, name: str) -> Path:
        return self._files.path(f"{shard_name(shard)}/{name}")

    def rows(self, point: str) -> PointRows:
        """Return the rows of a point; SettingsError for one that the dataset does not have."""
        record = next((candidate for candidate in self.manifest.rows.points if candidate.name == point), None)
        if record is None:
            raise SettingsError(f"the dataset has the points {', '.join(self.points)}, got {point!r}")
        return PointRows(self, record)

    def index(self, shard: int) -> Mapping[str, npt.NDArray[Any]]:
        """Return the columns of a shard's index: prompt, position, token and scores of each row."""
        table = pq.read_table(self.path(shard, INDEX))
        return {name: table[name].to_numpy() for name in table.column_names}

    def torch_dataset(
        self,
        points: Sequence[str] | None = None,
        *,
        batch_size: int = 4096,
        shuffle_seed: int | None = None,
        window_rows: int = 2**16,
        with_index: bool = False,
    ) -> TorchDataset:
        """Return batches for a ``DataLoader(dataset, batch_size=None)``; see ``TorchDataset``."""
        names = self.points if points is None else list(points)
        return TorchDataset(
            self,
            {name: self.rows(name) for name in names},
            batch_size=batch_size,
            shuffle_seed=shuffle_seed,
            window_rows=window_rows,
            with_index=with_index,
        )


_CHUNKS_IN_WINDOW: Final = 16
_MAX_INDEXES: Final = 32


class TorchDataset(IterableDataset[Batch]):
    """Batches of rows, ``{point: [batch_size, width]}``, each row once in an epoch; the last may be smaller.

    Rows are read in chunks that lie together. With a seed the chunks of all shards are shuffled, and the rows
    of as many chunks as fill a window of ``window_rows`` among each other. The workers of a DataLoader share
    the chunks. ``with_index`` adds prompt, position and token of each row.
    """

    def __init__(
        self,
        dataset: ActivationDataset,
        rows: Mapping[str, PointRows],
        *,
        batch_size: int,
        shuffle_seed: int | None,
        window_rows: int,
        with_index: bool,
    ) -> None:
        if batch_size < 1 or window_rows < 1:
            raise SettingsError("`batch_size` and `window_rows` must be at least 1")
        self._dataset = dataset
        self._rows = rows
        self._batch_size = batch_size
        self._seed = shuffle_seed
        self._with_index = with_index
        self._chunk_rows = max(1, window_rows // _CHUNKS_IN_WINDOW)
        self._indexes: dict[int, Mapping[str, npt.NDArray[Any]]] = {}
        self._epoch = 0
        self._num_batches = 0  # of this epoch, that were yielded or are skipped
        self._counts_own_batches = True

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next epoch; workers that are started for each epoch have to be told."""
        self._epoch, self._num_batches = epoch, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and the batches that this process, a worker or the only one, has yielded of it."""
        return {"epoch": self._epoch, "batches": self._num_batches, "of_worker": True}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was taken, with the same number of workers.

        A plain DataLoader with workers does not return their states: give ``{"epoch": e, "batches": n,
        "of_worker": False}`` with the number of batches that the DataLoader has yielded.
        """
        self._epoch, self._num_batches = int(state["epoch"]), int(state["batches"])
        self._counts_own_batches = bool(state.get("of_worker", True))

    def __iter__(self) -> Iterator[Batch]:
        """Yield this worker's share of the epoch, after the batches that a loaded state counts as done."""
        worker = get_worker_info()
        worker_id, num_workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        chunks = self._chunks()
        own_chunks = chunks[worker_id::num_workers]
        num_done = self._num_batches
        if not self._counts_own_batches:
            rows_of_workers = [int(chunks[other::num_workers, 1].sum()) for other in range(num_workers)]
            batches_of_workers = [-(-size // self._batch_size) for size in rows_of_workers]
            num_done = _share(num_done, batches_of_workers, worker_id)
            self._num_batches, self._counts_own_batches = num_done, True
        for numbers in self._batches(own_chunks, worker_id, num_done):
            self._num_batches += 1
            yield self._read(numbers)
        self.set_epoch(self._epoch + 1)

    def _chunks(self) -> Numbers:
        """Return the first row and the number of rows of each chunk, ``[n, 2]``, in the epoch's order."""
        parts = [np.zeros((0, 2), np.int64)]
        for start, shard in zip(self._dataset.starts, self._dataset.shards, strict=True):
            firsts = np.arange(0, shard.num_rows, self._chunk_rows, dtype=np.int64)
            sizes = np.minimum(self._chunk_rows, shard.num_rows - firsts)
            parts.append(np.stack([start + firsts, sizes], axis=1))
        chunks = np.concatenate(parts)
        return chunks if self._seed is None else chunks[self._random(0).permutation(len(chunks))]

    def _random(self, *key: int) -> np.random.Generator:
        """Return a generator of this epoch: key ``0`` orders the chunks, ``1 + worker, window`` a window."""
        return np.random.default_rng([self._seed or 0, self._epoch, *key])

    def _batches(self, chunks: Numbers, worker: int, skipped: int) -> Iterator[Numbers]:
        """Yield the row numbers of a worker's batches after the first ``skipped``.

        Windows before these are not made; rows that fill no batch go with the next window's.
        """
        rows_to_skip = skipped * self._batch_size
        pending = np.zeros(0, np.int64)
        for window in range(0, len(chunks), _CHUNKS_IN_WINDOW):
            window_chunks = chunks[window : window + _CHUNKS_IN_WINDOW]
            size = int(window_chunks[:, 1].sum())
            if rows_to_skip >= size:
                rows_to_skip -= size
                continue
            numbers = np.concatenate([np.arange(first, first + count) for first, count in window_chunks])
            if self._seed is not None:
                numbers = numbers[self._random(1 + worker, window).permutation(size)]
            pending = np.concatenate([pending, numbers[rows_to_skip:]])
            rows_to_skip = 0
            num_full = len(pending) - len(pending) % self._batch_size
            for start in range(0, num_full, self._batch_size):
                yield pending[start : start + self._batch_size]
            pending = pending[num_full:]
        if len(pending):
            yield pending

    def _read(self, numbers: Numbers) -> Batch:
        batch = {name: rows.read(numbers) for name, rows in self._rows.items()}
        if self._with_index:
            batch.update(self._index_of(numbers))
        return batch

    def _columns(self, shard: int) -> Mapping[str, npt.NDArray[Any]]:
        if shard not in self._indexes:
            if len(self._indexes) >= _MAX_INDEXES:
                del self._indexes[next(iter(self._indexes))]
            self._indexes[shard] = self._dataset.index(shard)
        return self._indexes[shard]

    def _index_of(self, numbers: Numbers) -> Batch:
        """Return prompt, position and token of rows by their numbers in the dataset, each ``[n]``."""
        shards = np.searchsorted(self._dataset.starts, numbers, side="right") - 1
        columns = {name: np.empty(len(numbers), np.int64) for name in INDEX_COLUMNS}
        for shard in np.unique(shards):
            index = self._columns(int(shard))
            indexes = np.flatnonzero(shards == shard)
            for name, column in columns.items():
                column[indexes] = index[name][numbers[indexes] - self._dataset.starts[shard]]
        return {name: torch.from_numpy(column) for name, column in columns.items()}


def _share(num_batches: int, counts: Sequence[int], worker: int) -> int:
    """Return how many of a DataLoader's first batches were a worker's; it asks its workers in turn.

    ``counts`` has the batches of each worker in an epoch; a worker that has no more is passed over.
    """
    done = [0] * len(counts)
    rounds_done = 0
    while num_batches:
        active = [index for index, count in enumerate(counts) if count > rounds_done]
        if not active:
            break
        num_rounds = min(min(counts[index] for index in active) - rounds_done, num_batches // len(active))
        if num_rounds == 0:
            for index in active[:num_batches]:
                done[index] += 1
            break
        for index in active:
            done[index] += num_rounds
        rounds_done += num_rounds
        num_batches -= num_rounds * len(active)
    return done[worker]
