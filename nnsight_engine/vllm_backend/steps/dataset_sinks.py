"""The datasets that a worker writes: rows go to a writer's thread, and not to the scheduler.

A request of a dataset generates nothing; the last operation of its plan captures its rows, all in the prompt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.core.sched.output import SchedulerOutput

from nnsight_engine.core.dtypes import ITEM_BYTES
from nnsight_engine.core.model_spec import ModelSpec
from nnsight_engine.datasets.manifest import DatasetError, Manifest, ShardRecord, error_named
from nnsight_engine.datasets.plan import RowSelection, ShardPlan
from nnsight_engine.datasets.shards import PromptRows
from nnsight_engine.datasets.writer import DatasetWriter, Progress, WriterOptions
from nnsight_engine.plans.records import StepRecord, StepResults, leaf_width, width_classes
from nnsight_engine.plans.request_plan import PLAN_KEY, PlannedOp, RequestPlan
from nnsight_engine.vllm_backend.compat import entry_of, params_of

DATASET_KEY: Final = "nnsight_engine_dataset"
"""Key of ``extra_args`` by which a request is a prompt of a dataset, see ``DatasetEntry``."""


class DatasetEntry(msgspec.Struct, frozen=True):
    """The dataset's key, and the prompt's number."""

    key: str
    prompt: int


class SinkProgress(msgspec.Struct, frozen=True):
    """``Progress`` as it is sent; ``failure`` is the name of an error of ``datasets`` and its message."""

    counts: dict[str, int]
    is_complete: bool
    failure: tuple[str, str] | None = None

    @classmethod
    def of(cls, progress: Progress, *, is_complete: bool) -> SinkProgress:
        counts = {
            field.name: getattr(progress, field.name)
            for field in dataclasses.fields(progress)
            if field.name != "failure"
        }
        error = progress.failure
        return cls(counts, is_complete, None if error is None else (type(error).__name__, str(error)))

    def progress(self) -> Progress:
        failure = None if self.failure is None else error_named(*self.failure)
        return Progress(**self.counts, failure=failure)


@dataclasses.dataclass(slots=True)
class _Prompt:
    """A prompt whose rows are computed; ``tokens`` are its ids."""

    dataset: _Dataset
    number: int
    tokens: npt.NDArray[np.int32]
    plan: RequestPlan
    records: list[StepRecord]

    def rows(self, spec: ModelSpec) -> PromptRows:
        """Return the captured rows for the writer, with the positions and tokens that the index has."""
        op = self.plan.ops[-1]
        positions = np.asarray([at for record in self.records for at in record.positions], np.int32)
        values = values_of(op, spec, self.records)
        index = self.dataset.selection.index(positions, self.tokens)
        return PromptRows(self.number, *index, values)


@dataclasses.dataclass(slots=True)
class _Dataset:
    writer: DatasetWriter
    selection: RowSelection


class DatasetSinks:
    """Rows are taken on the thread that delivers results; all else is called on the one that runs steps."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._datasets: dict[str, _Dataset] = {}
        self._prompts: dict[str, _Prompt] = {}

    def __bool__(self) -> bool:
        return bool(self._datasets)

    def open(self, key: str, to: str, manifest: bytes, options: WriterOptions) -> SinkProgress:
        """Begin to write a dataset, or the rest of it; an error is part of what is returned."""
        try:
            settings = Manifest.decode(manifest, to)
            writer = DatasetWriter(to, settings, **options)
        except DatasetError as error:
            return SinkProgress.of(Progress(failure=error), is_complete=False)
        self._datasets[key] = _Dataset(writer, RowSelection(settings.rows))
        return self.progress(key)

    def completed(self, key: str, number: int) -> ShardRecord | None:
        return self._datasets[key].writer.completed(number)

    def begin_shard(self, key: str, shard: ShardPlan, empty: Sequence[int]) -> None:
        """Announce a shard; prompts of ``empty`` have no rows, and are not computed."""
        dataset = self._datasets[key]
        dataset.writer.begin(shard)
        none = np.zeros(0, np.int32)
        points = dataset.writer.manifest.rows.points
        for number in empty:
            values = {point.name: np.zeros((0, point.width), np.float32) for point in points}
            dataset.writer.put(PromptRows(number, none, none, values))

    def progress(self, key: str) -> SinkProgress:
        writer = self._datasets[key].writer
        return SinkProgress.of(writer.progress(), is_complete=writer.is_complete)

    def close(self, key: str, *, complete: bool) -> SinkProgress:
        """Stop; waits until everything is written if the dataset is ``complete``."""
        writer = self._datasets.pop(key).writer
        progress = writer.close(complete=complete)
        for request_id in [name for name, prompt in self._prompts.items() if prompt.dataset.writer is writer]:
            self._prompts.pop(request_id, None)
        return SinkProgress.of(progress, is_complete=writer.is_complete)

    def begin_step(self, scheduled: SchedulerOutput) -> None:
        """Register the step's new prompts of datasets, and drop finished ones."""
        for request_id in scheduled.finished_req_ids:
            self._prompts.pop(request_id, None)
        for request in scheduled.scheduled_new_reqs:
            params = params_of(request)
            entry = entry_of(params, DATASET_KEY)
            # A request that was preempted arrives a second time.
            if entry is None or request.req_id in self._prompts:
                continue
            dataset_entry = msgspec.convert(entry, DatasetEntry)
            dataset = self._datasets.get(dataset_entry.key)
            if dataset is not None:  # else it was closed meanwhile, and nobody wants its rows
                tokens = np.asarray(request.prompt_token_ids, np.int32)
                plan = entry_of(params, PLAN_KEY)["plan"]
                self._prompts[request.req_id] = _Prompt(dataset, dataset_entry.prompt, tokens, plan, [])

    def take(self, results: StepResults) -> None:
        """Take the records of prompts out of a step's results, and hand those over that are whole."""
        for request_id in results.failures:
            self._prompts.pop(request_id, None)
        for request_id, info in results.infos.items():
            prompt = self._prompts.get(request_id)
            if prompt is None:
                continue
            last_op = len(prompt.plan.ops) - 1
            records = results.records.pop(request_id, [])
            prompt.records += [record for record in records if record.op == last_op]
            # ``close``, on the other thread, may have removed the prompt meanwhile.
            if (
                info.end_position >= prompt.plan.prompt_len
                and self._prompts.pop(request_id, None) is not None
            ):
                prompt.dataset.writer.put(prompt.rows(self._spec))


def values_of(
    op: PlannedOp, spec: ModelSpec, records: Sequence[StepRecord]
) -> dict[str, npt.NDArray[np.float32] | torch.Tensor]:
    """Return the captured rows by point, ``[rows, width]``; of a mean its row."""
    item_type = (
        np.float32 if op.reduce == "mean" or ITEM_BYTES[op.dtype] == np.float32().itemsize else np.int16
    )
    values: dict[str, npt.NDArray[np.float32] | torch.Tensor] = {}
    for width_class, indices in enumerate(width_classes(op, spec)):
        shape = (-1, len(indices), leaf_width(op.sites[indices[0]], spec))
        pieces = [np.frombuffer(record.parts[width_class], item_type).reshape(shape) for record in records]
        rows: npt.NDArray[Any] = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        if op.reduce == "mean":
            num_rows = sum(len(record.positions) for record in records)
            rows = rows.sum(0, dtype=np.float32, keepdims=True) / np.float32(num_rows)
        for column, index in enumerate(indices):
            site_rows = rows[:, column]
            is_float = item_type is np.float32
            values[str(op.sites[index])] = (
                site_rows if is_float else torch.from_numpy(site_rows.copy()).view(torch.bfloat16)
            )
    return values
