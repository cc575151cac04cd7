"""The datasets that a worker writes: rows go to a writer's thread, and not to the scheduler.

A request of a dataset generates nothing; the last operation of its plan captures its rows, all in the prompt.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Mapping, Sequence
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
from nnsight_engine.datasets.writer import DatasetWriter, Progress, WriterOptions, options_from_plain
from nnsight_engine.plans.records import StepRecord, StepResults, leaf_width, width_classes
from nnsight_engine.plans.request_plan import PLAN_KEY, PlannedOp, RequestPlan
from nnsight_engine.vllm_backend.compat import entry_of, params_of

logger = logging.getLogger(__name__)

DATASET_KEY: Final = "nnsight_engine_dataset"
"""Key of ``extra_args`` by which a request is a prompt of a dataset, see ``DatasetEntry``."""


class DatasetEntry(msgspec.Struct, frozen=True):
    """The dataset's key, and the prompt's number."""

    key: str
    prompt: int


class SinkState(msgspec.Struct, frozen=True):
    """How far a dataset is, as it is sent to the driver.

    ``failure`` is the name of an error of ``datasets`` and its message. ``num_received`` counts the prompts
    whose rows the writer has been given.
    """

    is_open: bool = False
    has_ended: bool = False
    is_complete: bool = False
    num_received: int = 0
    counts: dict[str, int] = {}
    failure: tuple[str, str] | None = None

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
    """``writer`` is None until it is open; ``failure`` is that of opening it."""

    selection: RowSelection
    writer: DatasetWriter | None = None
    failure: DatasetError | None = None
    num_received: int = 0

    def open(self, to: str, manifest: Manifest, options: WriterOptions) -> None:
        try:
            self.writer = DatasetWriter(to, manifest, **options)
        except DatasetError as error:
            self.failure = error
        except Exception as error:
            logger.exception("a dataset could not be opened")
            self.failure = DatasetError(f"{to} could not be opened: {type(error).__name__}: {error}")

    def put(self, rows: PromptRows) -> None:
        if self.writer is not None:
            self.writer.put(rows)
            self.num_received += 1

    def state(self) -> SinkState:
        writer = self.writer
        progress = Progress(failure=self.failure) if writer is None else writer.progress()
        counts = dataclasses.asdict(dataclasses.replace(progress, failure=None))
        del counts["failure"]
        error = progress.failure
        return SinkState(
            is_open=writer is not None,
            has_ended=self.failure is not None or (writer is not None and writer.has_ended),
            is_complete=writer is not None and writer.is_complete,
            num_received=self.num_received,
            counts=counts,
            failure=None if error is None else (type(error).__name__, str(error)),
        )


class DatasetSinks:
    """Nothing here waits for a disk: datasets are opened, written and closed by threads of their own.

    Arguments and results are plain values, which vLLM's RPC can send.
    Rows are taken on the thread that delivers results; all else is called on the one that runs steps.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._datasets: dict[str, _Dataset] = {}
        self._prompts: dict[str, _Prompt] = {}

    def open(self, key: str, to: str, manifest: bytes, options: Mapping[str, Any]) -> None:
        """Begin to open a dataset, or what there is of it; ``state`` says when it is open."""
        settings = Manifest.decode(manifest, to)
        dataset = self._datasets[key] = _Dataset(RowSelection(settings.rows))
        arguments = to, settings, options_from_plain(options)
        threading.Thread(target=dataset.open, args=arguments, name="dataset-open", daemon=True).start()

    def count_shard(self, key: str, record: Mapping[str, Any]) -> None:
        """Count a shard that is complete."""
        self._writer(key).count(msgspec.convert(record, ShardRecord))

    def begin_shard(self, key: str, shard: Mapping[str, Any], empty: Sequence[int]) -> None:
        """Announce a shard; prompts of ``empty`` have no rows, and are not computed."""
        writer = self._writer(key)
        writer.begin(msgspec.convert(shard, ShardPlan))
        none = np.zeros(0, np.int32)
        for number in empty:
            values = {
                point.name: np.zeros((0, point.width), np.float32) for point in writer.manifest.rows.points
            }
            self._datasets[key].put(PromptRows(number, none, none, values))

    def state(self, key: str) -> dict[str, Any]:
        """Return the fields of ``SinkState``."""
        state: dict[str, Any] = msgspec.to_builtins(self._datasets[key].state())
        return state

    def end(self, key: str, *, complete: bool) -> None:
        """Begin to close a dataset, and take no more rows for it."""
        dataset = self._datasets[key]
        for request_id in [name for name, prompt in list(self._prompts.items()) if prompt.dataset is dataset]:
            self._prompts.pop(request_id, None)
        if dataset.writer is not None:
            dataset.writer.end(complete=complete)

    def forget(self, key: str) -> None:
        """Forget a dataset that has ended."""
        self._datasets.pop(key, None)

    def _writer(self, key: str) -> DatasetWriter:
        writer = self._datasets[key].writer
        if writer is None:
            raise RuntimeError("the dataset is not open")
        return writer

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
            # Without one the driver has ended it, and its requests are about to be aborted.
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
                prompt.dataset.put(prompt.rows(self._spec))


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
