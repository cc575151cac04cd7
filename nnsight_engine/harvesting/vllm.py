"""The driver for ``VLLM``: the rows are written by a thread of the worker that computes them.

Requests of a pack run in a step of their own, see ``vllm_backend.background``. Several packs are sent at a
time, so that the engine never waits for the next.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Self, get_args

import msgspec
import torch
from vllm.sampling_params import SamplingParams

import nnsight_engine
from api_schemas.errors import ApiError, ErrorCode
from api_schemas.interventions import FIELD, Operation, parse_interventions
from api_schemas.operations import Capture, Where, Write
from api_schemas.points import ENCODER_BLOCK, PointPattern
from nnsight_engine.core.dtypes import ITEM_BYTES
from nnsight_engine.core.model_spec import PATTERN, STATE, ModelSpec
from nnsight_engine.core.token_texts import TokenTexts
from nnsight_engine.datasets.loader import ActivationDataset, load
from nnsight_engine.datasets.manifest import (
    MANIFEST,
    DatasetError,
    EngineIdentity,
    Interventions,
    Manifest,
    ModelIdentity,
    PlanSettings,
    Point,
    SettingsError,
    ShardRecord,
)
from nnsight_engine.datasets.plan import (
    PlannedShard,
    Planner,
    RowSelection,
    ShardPlan,
    Tokens,
    check_prompts,
    remaining_shards,
)
from nnsight_engine.datasets.storage import open_storage
from nnsight_engine.datasets.writer import options_to_plain, record_in
from nnsight_engine.harvesting.driver import Display, Encoder, by_ids, names_of, unknown_point
from nnsight_engine.harvesting.request import HarvestRequest
from nnsight_engine.plans.compile.request import compile_request
from nnsight_engine.plans.compile.tensors import CombinedVectors
from nnsight_engine.plans.records import Payload
from nnsight_engine.plans.request_plan import PLAN_KEY, CompiledRequest
from nnsight_engine.remote_backend.messages import fingerprint_of
from nnsight_engine.vllm_backend.background import BACKGROUND_KEY, PackEntry
from nnsight_engine.vllm_backend.compat import EngineLimits, add_entries
from nnsight_engine.vllm_backend.cpu_plugin import VLLM_VERSION
from nnsight_engine.vllm_backend.engines import SyncEngine
from nnsight_engine.vllm_backend.operations_call import prepare_params
from nnsight_engine.vllm_backend.rpc_results import common_result
from nnsight_engine.vllm_backend.steps.dataset_sinks import DATASET_KEY, DatasetEntry, SinkState
from nnsight_engine.vllm_backend.vllm import VLLM

_PACKS_AT_ONCE: Final = 8
_POLL_S: Final = 0.05
_MATCHES_NOTHING: Final = frozenset({ErrorCode.CONTRADICTORY_WHERE, ErrorCode.POSITION_OUT_OF_RANGE})
"""Errors of an operation at positions that a prompt lacks."""


def harvest_vllm(model: VLLM, request: HarvestRequest) -> ActivationDataset:
    if model.own_edits.always:
        raise SettingsError("edits of a VLLM are code, which has no place here: use `interventions`")
    model.dispatch()
    engine = _Engine(model)
    settings = request.rows(engine.points(request.points), by_ids(request.where, model.tokenizer))
    operations = _operations(request.interventions)
    encode = Encoder(model.tokenizer, settings.max_tokens, engine.spec.max_model_len - 1)
    requests = _Requests(engine, settings.points, RowSelection(settings), operations, request.dtype)
    manifest = Manifest(
        model=engine.identity,
        engine=engine.versions,
        tokenizer=str(model.tokenizer.name_or_path),
        source=request.prompts.identity,
        rows=settings,
        plan=engine.plan(request, requests.row_bytes),
        interventions=requests.interventions,
    )
    with (
        Display(show=request.options.get("show_progress")) as display,
        _Sink(engine, request, manifest, display) as sink,
    ):
        if sink.is_complete:
            check_prompts(request.prompts, sink.records())
        else:
            shards = remaining_shards(
                request.prompts, Planner(manifest.plan, settings), completed=sink.completed, encode=encode
            )
            for shard in shards:
                requests.run(shard, sink)
    return load(request.to)


class _Engine:
    def __init__(self, model: VLLM) -> None:
        if not isinstance(model.host, SyncEngine):
            raise SettingsError('harvest() takes a VLLM with mode="sync", the default')
        self.model = model
        self.host = model.host
        self.spec = ModelSpec.from_plain(common_result(self.host.call("describe_interventions")))
        self.config: Any = self.host.inner.llm_engine.vllm_config

    @property
    def identity(self) -> ModelIdentity:
        config = self.config.model_config
        hashes = self.host.call("hash_weights", fingerprint_of(config.hf_config))
        fingerprint = hashlib.sha256("".join(hashes).encode()).hexdigest()
        return ModelIdentity(self.spec.name, fingerprint, config.revision or "", self.spec.dtype)

    @property
    def versions(self) -> EngineIdentity:
        return EngineIdentity(
            "vllm",
            {
                "nnsight_engine": nnsight_engine.__version__,
                "torch": str(torch.__version__),
                "vllm": VLLM_VERSION,
            },
            {name: str(value) for name, value in self._settings().items()},
        )

    def _settings(self) -> dict[str, Any]:
        """Return what decides about the last bits of values, beside the weights."""
        config, parallel = self.config, self.config.parallel_config
        return {
            "device": self.config.device_config.device_type,
            "enforce_eager": config.model_config.enforce_eager,
            "kv_cache_dtype": config.cache_config.cache_dtype,
            "max_num_batched_tokens": self.spec.max_num_batched_tokens,
            "pipeline_parallel_size": parallel.pipeline_parallel_size,
            "quantization": config.model_config.quantization,
            "tensor_parallel_size": parallel.tensor_parallel_size,
        }

    def plan(self, request: HarvestRequest, row_bytes: int) -> PlanSettings:
        """Return the settings of packs, which fit a step; raise SettingsError for those that do not.

        ``row_bytes`` are those of a row as it is captured: two packs may be under way.
        """
        captured = EngineLimits.read(self.config).max_capture_bytes_engine // (2 * row_bytes)
        limits = {
            "pack_tokens": max(1, min(self.spec.max_num_batched_tokens, captured)),
            "pack_prompts": self.config.scheduler_config.max_num_seqs,
        }
        plan = request.plan
        for name, limit in limits.items():
            if getattr(plan, name) > limit:
                if name in request.options:
                    raise SettingsError(f"`{name}` is at most {limit} with this engine and these points")
                plan = msgspec.structs.replace(plan, **{name: limit})
        return plan

    def points(self, patterns: Iterable[str]) -> list[Point]:
        points = []
        for name in names_of(patterns, self.spec.num_layers):
            point = PointPattern.parse(name)
            layer = -1 if point.layers is None else point.layers.resolve(self.spec.num_layers)[0]
            leaf = self.spec.leaf(point.leaf, layer)
            if leaf is None or point.leaf in {PATTERN, STATE, ENCODER_BLOCK}:
                raise unknown_point(name)
            points.append(Point(name, leaf.width))
        return points


class _Requests:
    """Makes and runs the requests of packs."""

    def __init__(
        self,
        engine: _Engine,
        points: list[Point],
        selection: RowSelection,
        operations: tuple[Operation, ...],
        dtype: str,
    ) -> None:
        self._engine = engine
        self._selection = selection
        self._operations = operations
        self._texts = TokenTexts(engine.model.tokenizer)
        # Rounded where the rows are written, unless the model's own numbers are narrow.
        narrow = dtype == "bfloat16" and engine.spec.dtype == "bfloat16"
        self._capture = Capture(
            op="capture",
            name="rows",
            at=[point.name for point in points],
            dtype="bfloat16" if narrow else "float32",
            reduce="mean" if selection.is_mean else "none",
        )
        self.row_bytes = ITEM_BYTES[self._capture.dtype or ""] * sum(point.width for point in points)

    @property
    def interventions(self) -> Interventions:
        if not self._operations:
            return Interventions()
        plain = [operation.model_dump(mode="json", exclude_defaults=True) for operation in self._operations]
        return Interventions(hashlib.sha256(msgspec.json.encode(plain, order="sorted")).hexdigest(), plain)

    def run(self, shard: PlannedShard, sink: _Sink) -> None:
        numbers = itertools.count(shard.first_prompt)
        packs = [[(next(numbers), tokens) for tokens in pack] for pack in shard.packs]
        rows = {
            number: self._selection.positions(number, tokens) for pack in packs for number, tokens in pack
        }
        sink.begin(shard, [number for number, positions in rows.items() if not len(positions)])
        wanted = [[(number, tokens) for number, tokens in pack if len(rows[number])] for pack in packs]
        num_tokens = max((sum(len(tokens) for _, tokens in pack) for pack in wanted), default=0)
        num_packs = sink.num_packs(num_tokens * self.row_bytes)
        for several in _batched([pack for pack in wanted if pack], num_packs):
            sink.wait_for_room()
            prompts, params = [], []
            for pack in several:
                key = secrets.token_hex(8)
                for index, (number, tokens) in enumerate(pack):
                    # Other requests must not find keys and values that interventions have changed.
                    prompts.append({"prompt_token_ids": tokens.tolist(), "cache_salt": sink.key})
                    entry = PackEntry(key, len(pack), index)
                    params.append(self._params(number, tokens, rows[number], entry, sink.key))
            for number, output in zip(
                (number for pack in several for number, _ in pack),
                self._engine.host.run(prompts, params),
                strict=True,
            ):
                _check(number, output)
            sink.note_sent(len(prompts))

    def _params(
        self, number: int, tokens: Tokens, positions: Tokens, pack: PackEntry, dataset: str
    ) -> SamplingParams:
        is_all = len(positions) == len(tokens)
        where = Where(phase="prompt", positions=None if is_all else positions.tolist())
        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        prepare_params(params, self._compiled(tokens.tolist(), where), secrets.token_hex(8))
        add_entries(
            params,
            {
                DATASET_KEY: msgspec.to_builtins(DatasetEntry(dataset, number)),
                BACKGROUND_KEY: msgspec.to_builtins(pack),
            },
        )
        return params

    def _compiled(self, token_ids: list[int], where: Where) -> CompiledRequest:
        operations = list(self._operations)
        while True:
            try:
                return compile_request(
                    [*operations, self._capture.model_copy(update={"where": where})],
                    spec=self._engine.spec,
                    prompt_token_ids=token_ids,
                    max_tokens=1,
                    token_of=self._texts.token,
                    stream=False,
                    combined=CombinedVectors(self._engine.spec),
                )
            except ApiError as error:
                index = _operation_of(error)
                if error.code in _MATCHES_NOTHING and index is not None and index < len(operations):
                    del operations[index]  # as positions that a prompt lacks have no rows
                    continue
                raise SettingsError(f"a prompt of {len(token_ids)} tokens: {error.message}") from error


class _Sink:
    """The dataset's writer in the worker; a context manager that ends it."""

    def __init__(
        self, engine: _Engine, request: HarvestRequest, manifest: Manifest, display: Display
    ) -> None:
        self._host = engine.host
        self._display = display
        self._options = request.writer
        self._manifest = manifest
        self._to = request.to if "://" in request.to else os.path.abspath(os.path.expanduser(request.to))
        # Only read here.
        self._storage = open_storage(self._to, retries=self._options["retries"])
        self._num_sent = 0
        self.key = secrets.token_hex(8)
        self._state = SinkState()

    def __enter__(self) -> Self:
        try:
            self._host.call(
                "open_dataset", self.key, self._to, self._manifest.encode(), options_to_plain(self._options)
            )
            self._wait_until(lambda state: state.is_open or state.has_ended)
            self.check()
        except BaseException:
            self._end(complete=False)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end(complete=kind is None)
        if kind is None:
            self.check()

    def _end(self, *, complete: bool) -> None:
        self._host.call("end_dataset", self.key, complete)
        self._wait_until(lambda state: state.has_ended)
        self._host.call("forget_dataset", self.key)

    @property
    def is_complete(self) -> bool:
        return self._state.is_complete

    def records(self) -> list[ShardRecord]:
        """Return the shards of a dataset that is complete."""
        data = self._storage.read(MANIFEST)
        return [] if data is None else Manifest.decode(data, self._to).shards

    def completed(self, number: int) -> ShardRecord | None:
        record = record_in(self._storage, number)
        if record is not None:
            self._host.call("count_shard", self.key, msgspec.to_builtins(record))
        return record

    def begin(self, shard: PlannedShard, empty: list[int]) -> None:
        plan = ShardPlan(shard.number, shard.first_prompt, shard.num_prompts, shard.digest)
        self._host.call("begin_shard", self.key, msgspec.to_builtins(plan), empty)
        self._num_sent += len(empty)

    def num_packs(self, pack_bytes: int) -> int:
        """Return how many packs may be computed before room is looked for again, one at least."""
        return max(1, min(_PACKS_AT_ONCE, self._options["pending_limit_bytes"] // max(1, pack_bytes)))

    def wait_for_room(self) -> None:
        limit = self._options["pending_limit_bytes"]
        is_slow = self._options["policy"] == "slow"
        self._wait_until(lambda state: not is_slow or state.counts["pending_bytes"] < limit)
        self.check()

    def note_sent(self, num_prompts: int) -> None:
        """Check that the worker has the rows of all prompts that were computed."""
        self._num_sent += num_prompts
        self._update()
        self.check()
        if self._state.num_received != self._num_sent:
            raise DatasetError(
                f"the worker has the rows of {self._state.num_received} prompts, and {self._num_sent} were "
                "computed; this is a defect, please report it"
            )

    def check(self) -> None:
        """Raise the writer's failure."""
        progress = self._state.progress()
        self._display.show(progress)
        if progress.failure is not None:
            raise progress.failure

    def _wait_until(self, is_so: Callable[[SinkState], bool]) -> None:
        self._update()
        while not (is_so(self._state) or (self._state.failure is not None and self._state.has_ended)):
            time.sleep(_POLL_S)
            self._update()

    def _update(self) -> None:
        state = common_result(self._host.call("dataset_state", self.key))
        self._state = msgspec.convert(state, SinkState)
        self._display.show(self._state.progress())


def _operations(raw: Any) -> tuple[Operation, ...]:
    """Return operations that write; raise SettingsError for others, and for a mistake."""
    try:
        operations = parse_interventions(list(raw or ()))
    except ApiError as error:
        raise SettingsError(f"`interventions`: {error.message}") from error
    writes = tuple(operation for operation in operations if isinstance(operation, get_args(Write)))
    if len(writes) < len(operations):
        raise SettingsError(
            "`interventions` are operations that write: a trace is code, which has no place here, and the "
            "points are what is read"
        )
    return writes


def _batched(packs: list[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(packs), size):
        yield packs[start : start + size]


def _operation_of(error: ApiError) -> int | None:
    """Return the index of the operation that an error is about, from ``interventions.2.where``."""
    parts = (error.param or "").split(".")
    return int(parts[1]) if len(parts) > 1 and parts[0] == FIELD and parts[1].isdecimal() else None


def _check(number: int, output: Any) -> None:
    """Raise DatasetError for a prompt that the engine could not compute."""
    payload = (output.kv_transfer_params or {}).get(PLAN_KEY)
    failure = None if payload is None else Payload.decode(payload["data"]).failure
    if failure is not None:
        raise DatasetError(f"prompt {number} could not be computed: {failure.message}")
    (choice,) = output.outputs
    if choice.finish_reason not in {"length", "stop"}:
        raise DatasetError(
            f"prompt {number} could not be computed: the engine ended it, {choice.finish_reason}"
        )
