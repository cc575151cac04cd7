"""Runs a sweep: batches of prompts, each with an operation of its own, in one request to the engine.

Sweeps take turns, tenants in turn; one has two batches in flight, each of at most one step's tokens, so that
other requests go first. All prompts are sent as token ids, and all positions as absolute ones. The metric is
an operation behind the cell's, at the last position, so it reads what a single request would.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
from starlette.requests import Request

from api_schemas.errors import ApiError, ErrorCode, clip
from api_schemas.interventions import FIELD, Operation
from api_schemas.sweeps import (
    MAX_FAILED_SHOWN,
    AnySweep,
    FailedCell,
    KlMetric,
    SteerSweep,
    Sweep,
    SweepBaseline,
    SweepProgress,
)
from app.admission.estimates import Estimate
from app.auth.principal import Principal
from app.engine.client import JsonObject
from app.engine.request_fields import isolate_cache
from app.engine.responses import tensors_json
from app.http.contexts import context_of
from app.services.operations import with_values
from app.services.sweeps.grid import Grid, grid_of
from app.services.sweeps.metrics import (
    METRIC,
    Floats,
    array_of,
    divergence,
    metric_operation,
    perplexity,
    reading_of,
)
from app.services.sweeps.prompts import Rows, SweptPrompt, continuation_of, swept_prompt
from app.services.sweeps.writes import ROWS, Cell, CellWrites
from nnsight_engine.plans.collect.results import TensorResult

if TYPE_CHECKING:
    from app.components import Components

Report = Callable[[SweepProgress], None]
T = TypeVar("T")

_IN_FLIGHT: Final = 2
_BATCH_CELLS: Final = 64
_BATCH_BYTES: Final = 32 * 2**20
"""Cells of one batch, and the bytes of their values."""
_MAX_TOKENS: Final = 2**31
_LARGEST: Final = float(np.finfo(np.float32).max)
_CELL_ERRORS: Final = {
    ErrorCode.NOT_FINITE, ErrorCode.INTERVENTION_FAILED, ErrorCode.PROMPT_WAS_CHUNKED,
}  # fmt: skip
"""Errors of one cell; others are mistakes of the request."""
_PAUSES_S: Final = (0.5, 1.0, 2.0, 4.0)
"""Before each further attempt while the server has no room for results."""
_FIELDS: Final = {
    "vector": "vector", "units": "heads", "where": "positions", "scale": "strengths",
    "changes": "features", "dictionary": "dictionary",
}  # fmt: skip
"""The sweep's field of a field of its operations."""
_METRIC_FIELDS: Final = {"targets.0": "token", "targets.1": "other", "features.0": "feature"}


async def run_sweep(
    context: Components, wanted: AnySweep, http: Request, caller: Principal, report: Report
) -> Sweep:
    """Raise ApiError for an invalid request, beyond a limit or a quota, or ``queue_full``."""
    # Without headers, since the request's own X-Request-Id must not be used for all cells' requests.
    quiet = Request({**http.scope, "headers": []}, http.receive)
    prompts = [
        await swept_prompt(context.engine, wanted, index, quiet) for index in range(len(wanted.prompts))
    ]
    grid = grid_of(wanted, context.engine.capabilities(), [len(prompt.changed) for prompt in prompts])
    work = SweepWork(context, wanted, quiet, caller, prompts, grid)
    work.continuation = await continuation_of(context.engine, wanted, quiet)
    work.check()
    admitted = context_of(http.scope).admitted
    estimate = Estimate(min(work.num_tokens, _MAX_TOKENS), 0)
    if admitted is not None:
        admitted.check_alone(estimate)
    await work.resolve()
    async with context.sweeps.request(caller.tenant):
        if admitted is not None:  # not before its turn, so that the tokens count when it runs
            await admitted.reserve(estimate)
        return await work.result(report)


class SweepWork:
    """One sweep; ``check`` and ``resolve`` come before ``result``.

    Attributes:
        continuation: Ids behind each prompt, whose perplexity is the metric.
    """

    def __init__(
        self,
        context: Components,
        wanted: AnySweep,
        http: Request,
        caller: Principal,
        prompts: list[SweptPrompt],
        grid: Grid,
    ) -> None:
        self._context, self._http, self._caller = context, http, caller
        self._wanted, self._prompts, self._grid = wanted, prompts, grid
        self._writes = CellWrites(wanted, grid)
        self._metric: tuple[Operation, ...] = ()
        self._sides = (False, True) if isinstance(wanted, SteerSweep) and wanted.control else (False,)
        self._total = grid.num_cells * len(self._sides)
        self._gate = asyncio.Semaphore(_IN_FLIGHT)
        self._failed: list[FailedCell] = []
        self._num_failed = 0
        self.continuation: list[int] = []

    @property
    def num_tokens(self) -> int:
        """The tokens of all runs, each of which generates one."""
        of_each, more = self._total // len(self._prompts), len(self.continuation) + 1
        return sum(
            of_each * (len(one.changed) + more)
            + sum(
                (len(ids) + more) * len(self._writes.captures(one, is_changed=ids is one.changed))
                for ids in (one.clean, one.corrupted)
                if ids is not None
            )
            for one in self._prompts
        )

    def check(self) -> None:
        """Raise ApiError for an unknown model, or beyond the limits of a sweep or of the model's context."""
        bounds, sizes = self._context.settings.bounds, self._context.engine.capabilities().sizes
        served = self._context.engine.served()
        if self._model not in (*served.names, *served.adapters):
            raise ApiError(
                ErrorCode.MODEL_NOT_FOUND,
                f"The model {clip(self._model)!r} does not exist; GET /v1/models lists the names.",
                "model",
            )
        if self._total > bounds.max_sweep_cells:
            axes = " × ".join(f"{len(labels)} {name}s" for name, labels in self._grid.axes.items())
            control = " × 2 with the control" if len(self._sides) > 1 else ""
            raise ApiError(
                ErrorCode.INVALID_VALUE,
                f"A sweep has at most {bounds.max_sweep_cells} cells, got {self._total}: {axes}{control}.",
            )
        num_bytes = self._writes.num_bytes(self._prompts)
        if isinstance(self._wanted.metric, KlMetric):
            num_bytes += len(self._prompts) * sizes.vocab_size * np.dtype(np.float64).itemsize
        if num_bytes > bounds.max_sweep_bytes:
            raise ApiError(
                ErrorCode.INVALID_VALUE,
                f"A sweep keeps at most {bounds.max_sweep_bytes} bytes of its runs without interventions, "
                f"and this one {num_bytes}; name fewer prompts, layers or positions.",
                "prompts",
            )
        largest = max(
            self._writes.bytes_of(Cell(0, at), self._prompts[at["prompt"]]) for at in self._grid.cells()
        )
        if largest > bounds.max_tensor_bytes:
            raise ApiError(
                ErrorCode.TENSOR_TOO_LARGE,
                f"A cell may write {bounds.max_tensor_bytes} bytes, and one here writes {largest}; name "
                "`positions`, or shorter prompts.",
                "positions",
            )
        most = sizes.max_model_len - len(self.continuation) - 1
        for index, prompt in enumerate(self._prompts):
            longest = max(len(prompt.clean), len(prompt.corrupted or ()))
            if longest > most:
                raise ApiError(
                    ErrorCode.INVALID_VALUE,
                    f"A prompt here has at most {most} tokens, got {longest}.",
                    f"prompts.{index}",
                )

    async def resolve(self) -> None:
        """Find what the request's names stand for; raises ApiError if there is nothing of a name."""
        record, metric = context_of(self._http.scope).record, metric_operation(self._wanted.metric)
        named = self._writes.named
        operations = (*named.values(), *(() if metric is None else (metric,)))
        record.note_operations({"model": self._wanted.model}, operations)
        record.operations = [self._wanted.method, *([] if metric is None else [metric.op])]
        try:
            found: Any = await with_values(operations, self._http, self._context, self._caller)
        except ApiError as error:
            raise self._placed(error, len(named)) from error
        self._metric = found[len(named) :]
        self._writes.resolve(found[: len(named)])

    async def result(self, report: Report) -> Sweep:
        baselines = await _all([self._baseline(prompt) for prompt in self._prompts])
        values = np.full((len(self._sides), self._grid.num_cells), np.nan, np.float32)
        began, num_done = time.monotonic(), 0

        async def run(batch: list[Cell]) -> None:
            nonlocal num_done
            async with self._gate:
                scores = await self._scores(batch)
            for cell, score in zip(batch, scores, strict=True):
                values[int(cell.is_control), cell.number] = score
            num_done += len(batch)
            left_s = (time.monotonic() - began) / num_done * (self._total - num_done)
            report(SweepProgress(done=num_done, total=self._total, seconds_left=round(left_s, 2)))

        await _all([run(batch) for batch in self._batches()])
        return await self._answer(values, baselines)

    async def _answer(self, values: npt.NDArray[np.float32], baselines: list[SweepBaseline]) -> Sweep:
        grid, scope = self._grid, self._http.scope
        shape = tuple(len(grid.axes[name]) for name in grid.dims)
        tensors = {
            name: TensorResult("float32", shape, side.astype("<f4").tobytes())
            for name, side in zip(("values", "control"), values, strict=False)
        }
        settings, path = self._context.settings, str(scope.get("root_path", ""))
        store, work = self._context.store, context_of(scope)
        found = await _once_there_is_room(
            lambda: tensors_json(tensors, store, work, settings, base_path=path)
        )
        return Sweep(
            model=self._model,
            method=self._wanted.method,
            metric=self._wanted.metric.type,
            dims=grid.dims,
            coords={name: grid.axes[name] for name in grid.dims},
            baselines=baselines,
            tokens=[prompt.tokens for prompt in self._prompts],
            num_failed=self._num_failed,
            failed=sorted(self._failed, key=lambda one: (one.control, one.index)),
            **found,
        )

    @property
    def _model(self) -> str:
        return self._wanted.model or self._context.engine.served().names[0]

    async def _baseline(self, prompt: SweptPrompt) -> SweepBaseline:
        """Run a prompt without interventions, and keep what its cells need."""
        runs = {"clean": prompt.clean, "corrupted": prompt.corrupted}
        given = {name: ids for name, ids in runs.items() if ids is not None}
        readings = await _all([self._unsteered(prompt, ids) for ids in given.values()])
        scores = {name: self._score(one, prompt) for name, one in zip(given, readings, strict=True)}
        found = {name: score if math.isfinite(score) else None for name, score in scores.items()}
        changed = "clean" if prompt.changed is prompt.clean else "corrupted"
        return SweepBaseline(clean=found["clean"], corrupted=found.get("corrupted"), unsteered=found[changed])

    async def _unsteered(self, prompt: SweptPrompt, ids: list[int]) -> Floats:
        is_changed = ids is prompt.changed
        rows = prompt.own_rows if is_changed else prompt.rows
        readings = []
        for captures in self._writes.captures(prompt, is_changed=is_changed):
            async with self._gate:
                try:
                    (choice,) = await self._choices([ids], captures)
                except ApiError as error:
                    raise self._placed(error, len(captures)) from error
                readings.append(self._reading(choice, len(ids)))
                for point, found in (await asyncio.to_thread(_rows_of, choice) if captures else {}).items():
                    rows.setdefault(point, {}).update(found)
        if is_changed:
            prompt.unsteered = readings[0]
        return readings[0]

    def _batches(self) -> Iterator[list[Cell]]:
        most = self._context.engine.capabilities().limits.max_num_batched_tokens
        batch: list[Cell] = []
        num_tokens = num_bytes = 0
        for side in self._sides:
            for number, at in enumerate(self._grid.cells()):
                cell, prompt = Cell(number, at, side), self._prompts[at["prompt"]]
                tokens = len(prompt.changed) + len(self.continuation)
                size = self._writes.bytes_of(cell, prompt)
                is_full = len(batch) == _BATCH_CELLS or num_tokens + tokens > most
                if batch and (is_full or num_bytes + size > _BATCH_BYTES):
                    yield batch
                    batch, num_tokens, num_bytes = [], 0, 0
                batch.append(cell)
                num_tokens, num_bytes = num_tokens + tokens, num_bytes + size
        yield batch

    async def _scores(self, cells: Sequence[Cell]) -> list[float]:
        """Return the metric of each cell, NaN for those that fail, which are noted."""
        prompts = [self._prompts[cell.at["prompt"]] for cell in cells]
        own: list[Operation] = []
        for index, (cell, prompt) in enumerate(zip(cells, prompts, strict=True)):
            own.append(self._writes.of(cell, prompt).model_copy(update={"prompts": [index]}))
            await asyncio.sleep(0)  # long prompts have large values
        try:
            choices = await self._choices([prompt.changed for prompt in prompts], own)
        except ApiError as error:
            if error.code not in _CELL_ERRORS:
                raise self._placed(error, len(own)) from error
            if len(cells) > 1:  # the engine refuses a request as a whole
                return [score for cell in cells for score in await self._scores([cell])]
            return [self._failing(cells[0], error.code, error.message)]
        scores = []
        for cell, prompt, choice in zip(cells, prompts, choices, strict=True):
            score = self._score(self._reading(choice, len(prompt.changed)), prompt)
            if not abs(score) <= _LARGEST:
                score = self._failing(cell, ErrorCode.NOT_FINITE, "The metric is not a finite number.")
            scores.append(score)
            await asyncio.sleep(0)  # a vocabulary of logits takes milliseconds
        return scores

    def _failing(self, cell: Cell, code: ErrorCode, message: str) -> float:
        self._num_failed += 1
        if len(self._failed) < MAX_FAILED_SHOWN:
            index = [cell.at[name] for name in self._grid.dims]
            self._failed.append(FailedCell(index=index, control=cell.is_control, code=code, message=message))
        return math.nan

    async def _choices(
        self, prompts: Sequence[list[int]], operations: Sequence[Operation]
    ) -> list[JsonObject]:
        """Run prompts with operations, and the metric behind them."""
        body: JsonObject = {"model": self._model, "max_tokens": 1, "temperature": 0}
        body["prompt"] = [[*ids, *self.continuation] for ids in prompts]
        if self.continuation:
            body["prompt_logprobs"] = 0
        isolate_cache(body, self._caller)
        operations = (*operations, *self._metric)
        engine, http = self._context.engine, self._http
        reply = await _once_there_is_room(lambda: engine.completions({**body}, operations, http, inline=True))
        choices: list[JsonObject] = (reply.body or {})["choices"]
        return sorted(choices, key=lambda choice: int(choice["index"]))

    def _reading(self, choice: JsonObject, prompt_len: int) -> Floats:
        if self.continuation:
            return perplexity(choice["prompt_logprobs"], self.continuation, prompt_len)
        return reading_of(choice[FIELD]["results"][METRIC])

    def _score(self, reading: Floats, prompt: SweptPrompt) -> float:
        if isinstance(self._wanted.metric, KlMetric):
            return math.nan if prompt.unsteered is None else divergence(prompt.unsteered, reading)
        return float(reading)

    def _placed(self, error: ApiError, num_writes: int) -> ApiError:
        """Return an error of an operation as one of the field of the sweep that it comes from."""
        head, _, path = (error.param or "").partition(".")
        number, _, rest = path.partition(".")
        if head != FIELD or not number.isdecimal():
            return error
        field = rest.partition(".")[0]
        if int(number) >= num_writes:
            param = ".".join(filter(None, ["metric", _METRIC_FIELDS.get(rest, rest)]))
        elif field == "where" and "where" in self._wanted.model_fields_set:
            param = rest
        else:
            param = _FIELDS.get(field, "points")
        return ApiError(error.code, f"`{param}`: {error.message}", param)


async def _once_there_is_room(make: Callable[[], Awaitable[T]]) -> T:
    """Try again after pauses while there is no room for results, a shortage of the moment."""
    for pause_s in _PAUSES_S:
        try:
            return await make()
        except ApiError as error:
            if error.code != ErrorCode.ENGINE_CAPTURE_FULL:
                raise
        await asyncio.sleep(pause_s)
    return await make()


async def _all(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Await coroutines together; if one fails, or this is cancelled, all are cancelled and awaited."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _rows_of(choice: JsonObject) -> Rows:
    rows: Rows = {}
    for name, result in choice[FIELD]["results"].items():
        positions = result["positions"]
        for point, tensor in result["points"].items() if name.startswith(ROWS) else ():
            values = array_of(tensor).reshape(len(positions), -1)
            rows[point] = dict(zip(positions, values, strict=True))
    return rows
