"""All traced requests of a worker, from arrival to collection of their saved values.

For each step the runner calls ``begin`` with the requests that arrived and finished, ``step`` when the rows
are final, ``running`` around the model, ``on_logits`` and ``on_samples`` behind it, and ``end``. The client
fetches a trace's saved values with ``collect`` after its requests have ended.

Of several ranks or stages one runs the blocks. The others do the same calls without requests of their own:
their dispatcher follows the one of the worker with the blocks, see ``TraceDispatcher.jointly``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExperts

from nnsight_engine.core.operator_choices import PROCESS
from nnsight_engine.envoys.architectures.named_points import EMBED, LOGITS
from nnsight_engine.interleaving.threads import Threads
from nnsight_engine.serialization import TRUSTED, Policy
from nnsight_engine.vllm_backend.model_points import base_module
from nnsight_engine.vllm_backend.module_tree import OutlineEntry, outline_of
from nnsight_engine.vllm_backend.traces.block_adapters import block_adapters
from nnsight_engine.vllm_backend.traces.caches import scanned
from nnsight_engine.vllm_backend.traces.context import TraceEntry
from nnsight_engine.vllm_backend.traces.edit_store import EditStore
from nnsight_engine.vllm_backend.traces.memory_accounting import MemoryAccount
from nnsight_engine.vllm_backend.traces.messages import KnownRequests, StepFacts
from nnsight_engine.vllm_backend.traces.model import Names, WorkerModel
from nnsight_engine.vllm_backend.traces.points import SAMPLES
from nnsight_engine.vllm_backend.traces.remote_modules import Description, described
from nnsight_engine.vllm_backend.traces.reporting import Report, Reporting
from nnsight_engine.vllm_backend.traces.request import TracedRequest, TraceSpan
from nnsight_engine.vllm_backend.traces.sandboxed.module_calls import CallableModules
from nnsight_engine.vllm_backend.traces.sandboxed.sandbox_pool import SandboxPool, open_sandbox_pool
from nnsight_engine.vllm_backend.traces.trace_dispatcher import (
    ModuleOrder,
    ModuleUsePredictor,
    TraceDispatcher,
)
from nnsight_engine.vllm_backend.traces.trace_store import EndedTrace, TraceStore

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.config import VllmConfig

    from nnsight_engine.vllm_backend.compat import EngineLimits
    from nnsight_engine.vllm_backend.model_points import ModelPoints

logger = logging.getLogger(__name__)


class WorkerTraces:
    """The traced requests of one worker.

    Attributes:
        policy: For blocks inside a sandbox process; None in the worker, whose senders are trusted.
        known: The traced requests that have not ended, of which all ranks know alike.
        in_step: Whether a block takes part in the running step.
        waited_s: Seconds that all steps so far have waited for blocks.
    """

    policy: Policy | None = None
    serves_stages = False

    def __init__(
        self,
        points: ModelPoints,
        config: VllmConfig,
        limits: EngineLimits,
        *,
        dispatcher: TraceDispatcher | None = None,
    ) -> None:
        """Build the tree of envoys over the loaded model; ``dispatcher`` is for several ranks or stages."""
        self.dispatcher = dispatcher if dispatcher is not None else TraceDispatcher()
        self.known = KnownRequests()
        self.in_step = False
        self.waited_s = 0.0
        self._points = points
        self._config = config
        self._adapters = block_adapters(points.model)
        self.dispatcher.model = self._new_model(Names())
        self.dispatcher.place.tokens = self.model.token_places()
        if points.layers and not points.has_stream:
            layers = [envoy for envoy in self.model.modules() if envoy._module in points.layers]  # noqa: SLF001
            self.dispatcher.streams = frozenset(
                f"{layer.path}.{side}" for layer in layers for side in ("input", "output")
            )
        self.dispatcher.held = frozenset(
            str(envoy.path)
            for envoy in self.model.modules()
            if isinstance(base_module(envoy._module), SharedExperts)  # noqa: SLF001 - as above
        )
        self.edits = EditStore(limits.max_edits, limits.max_edit_bytes)
        self._threads = Threads(limits.trace_step_s)
        self._max_bytes = limits.max_trace_bytes
        self._active: list[TracedRequest] = []
        self._num_arrived = 0
        self._live: dict[str, TracedRequest] = {}
        self._ended: list[str] = []  # failed outside a step; ``end_step`` returns them
        self.reporting = Reporting()
        self._limits = limits
        self._sandbox_reports: dict[str, Report] = {}
        self.sandboxes = SandboxPool(self.dispatcher, limits)
        self.store = TraceStore(self.sandboxes, self.reporting, self._threads, limits.max_trace_bytes)
        self._began_s = 0.0  # ``spent_s`` of the active requests when the step began
        self._module_use = ModuleUsePredictor()

    def _new_model(self, names: Names) -> WorkerModel:
        return WorkerModel(self._points, self._config, self.dispatcher, names=names)

    @property
    def model(self) -> WorkerModel:
        return self.dispatcher.model

    @property
    def idle(self) -> bool:
        """Whether no traced request is running, and none that failed on arrival has yet to be ended."""
        if self.dispatcher.is_joint:
            return not self.known.present
        return not (self._live or self._ended) and self.sandboxes.idle

    def outline(self) -> list[OutlineEntry]:
        return outline_of(self.model._module)  # noqa: SLF001 - an envoy of ours

    def num_live(self) -> dict[str, int]:
        """Return how much of each kind the worker holds."""
        counts = {
            "traced": len(self._live),
            "traces": len(self.store),
            "prints": len(self.reporting),
            "sandboxes": len(self.sandboxes),
        }
        return {**counts, "edits": self.edits.num_kept}

    # A step.

    def before(self, facts: StepFacts) -> None:
        """Do nothing: only the last stage of a pipeline serves others before its own part of a step."""

    def begin_step(self, facts: StepFacts) -> None:
        """Open the blocks of requests that arrived, and retire requests that finished."""
        # Without the traces themselves, which would stay until the next traced step.
        self.sandboxes.facts = dataclasses.replace(facts, arrived=())
        if self.known.note(facts) or self.known.sandboxed:
            self.dispatcher.jointly(lambda: self._update_requests(facts))

    def _update_requests(self, facts: StepFacts) -> None:
        """Retire requests that finished, start those that arrived, and drop traces that nobody collects."""
        for request_id in self._live.keys() & set(facts.finished):
            self._live.pop(request_id).retire()
        self.sandboxes.begin_step()
        for request_id, plain in facts.arrived:
            if request_id not in self.store.members:
                self._arrive(request_id, plain)
        for key in self.store.excess(self.has_block):
            self.drop(key)

    def _arrive(self, request_id: str, plain: Any) -> None:
        """Start a request's block, here or in its sandbox; an error is stored, and ends this request only."""
        try:
            entry = TraceEntry.from_plain(plain)
        except msgspec.ValidationError:
            logger.exception("a request brought something that is no trace")
            self._ended.append(request_id)
            return
        member = self.store.add(request_id, entry)
        try:
            member.choice = entry.choice_of(request_id)
            self._num_arrived += 1
            if entry.sandbox_of is not None:  # untrusted code never runs here, whatever the limits say
                brought = self.edits.filled_in(self.store.with_blocks(entry))
                self.sandboxes.arrive(request_id, brought, self._num_arrived, entry.sandbox_of)
                return
            self.store.decode(member, self.model, self.policy)
            if member.context is None:
                self._ended.append(request_id)
                return
            enter = self._entering(entry, self.reporting.open(request_id, entry))
            mediator = member.context.mediator(entry.index, member.choice, self._threads, enter)
            memory = MemoryAccount(self._max_bytes, partial(member.context.marked, entry.index))
            policy = self.policy or TRUSTED
            edits = self.edits.mediators(entry, member.choice, self.model, self._threads, enter, policy)
            member.request = TracedRequest(self.dispatcher, mediator, self._num_arrived, memory, edits)
            for position, edit in enumerate(edits):
                edit.idx = position - len(edits)  # negative: served before the block
            mediator.idx = entry.index
            member.request.is_dry_run = entry.is_dry_run
            member.request.needed_modules = self._module_use.expects_modules(member.context.code(entry.index))
            if entry.is_scan:
                member.shapes = scanned(member.request, self.model)
            member.request.start_blocks()
            self._live[request_id] = member.request
        except Exception as error:
            logger.debug("a trace could not be read", exc_info=True)
            member.error = error
            self._ended.append(request_id)

    def _entering(self, entry: TraceEntry, report: Callable[[], None]) -> Callable[[], None]:
        """Return what a block's thread calls first: it redirects prints, and selects the LoRA adapter."""

        def enter() -> None:
            report()
            self._adapters.enter(entry.adapter)

        return enter

    def prepare_sandbox(self) -> bool:
        """Start the sandbox processes if untrusted blocks run in them; return whether one is ready.

        Does not wait: call it again until it returns True. SandboxUnavailableError if processes cannot be
        started.
        """
        if self._limits.sandbox != PROCESS:
            return True
        if not self.sandboxes.is_open:
            served = CallableModules(
                self.model, self.dispatcher, self._points, self._config, self._limits, self._adapters
            )
            open_sandbox_pool(self.sandboxes, served, self.described_modules(), self._points, self._limits)
        return self.sandboxes.is_ready

    @property
    def undone(self) -> Sequence[str]:
        """The requests whose rows of the running step are discarded: it runs without their blocks."""
        return self.dispatcher.undone

    @property
    def waiting(self) -> frozenset[str]:
        """The requests that cannot continue before their sandbox process has answered."""
        return self.sandboxes.waiting

    @property
    def throttled(self) -> frozenset[str]:
        return self.sandboxes.throttled

    def wait_for_any(self, wait_s: float) -> None:
        """Wait, in a step without tokens, until a sandbox process has answered that blocks its requests."""
        if self.known.sandboxed:
            self.dispatcher.jointly(lambda: self.sandboxes.wait_for_any(wait_s))
        elif self.throttled:
            time.sleep(wait_s)  # the rest ends without an answer

    def described_modules(self) -> list[Description]:
        return described(self._points.model)

    # Names and edits that a client stores in the engine.

    def adopt(self, data: bytes) -> dict[str, Any] | None:
        """Apply a client's names and classes, before any trace; return the error as data, if any."""

        def adopt() -> None:
            self.dispatcher.model = self._threads.run(lambda: self._new_model(Names.read(data)))

        return self._failure_of(adopt)

    def keep_edit(self, name: str, data: bytes) -> dict[str, Any] | None:
        """Store an edit under a name; return the error as data, if any."""
        return self._failure_of(lambda: self.edits.keep(name, data, self.model, self._threads))

    def _failure_of(self, act: Callable[[], Any]) -> dict[str, Any] | None:
        """Run ``act`` for a client; return its error as data, since it must not be raised in the engine."""
        try:
            act()
        except Exception as error:  # noqa: BLE001 - whatever a client's code does
            return self.store.closing.error_data(error)
        return None

    # A step's rows.

    def has_block(self, request_id: str) -> bool:
        return request_id in self._live or self.sandboxes.has(request_id)

    def takes_part(self, request_id: str) -> bool:
        """Return whether a request is traced and its block still takes part in steps, as far as is known."""
        return request_id in self.known.present if self.dispatcher.is_joint else self.has_block(request_id)

    def step(self, spans: Sequence[TraceSpan], num_rows: int) -> bool:
        """Begin a step for these requests; return False if no block takes part in it."""
        if spans:
            self.in_step = self.dispatcher.start_step(spans, num_rows, lambda: self._step(spans, num_rows))
        return self.in_step

    def _step(self, spans: Sequence[TraceSpan], num_rows: int) -> bool:
        """Begin a step on the worker that runs the blocks; return False if no block takes part in it."""
        spans = [span for span in spans if self.has_block(span.request_id)]
        if not spans:
            return False
        self.dispatcher.begin_step()
        live_spans = [span for span in spans if span.request_id in self._live]  # others are sandboxed
        self._active = [self._live[span.request_id] for span in live_spans]
        self._began_s = sum(request.spent_s for request in self._active)
        for request, span in zip(self._active, live_spans, strict=True):
            request.begin_step(span, num_rows)
        if len(live_spans) < len(spans):
            self.sandboxes.step([span for span in spans if span.request_id not in self._live], num_rows)
        self.dispatcher.choose([*self._active, *self.sandboxes.active])
        return True

    @property
    def by_taps(self) -> bool:
        return self.dispatcher.by_taps

    @contextlib.contextmanager
    def tapped(self) -> Iterator[None]:
        """Observe only the taps while the model runs.

        UntappedError if blocks need more: call ``again``, and rerun the step under ``running``.
        """
        self.dispatcher.listen()
        try:
            yield
            self.dispatcher.at_end()
        finally:
            self.dispatcher.pause()
            self.model.forget_sources()

    def again(self) -> None:
        """Prepare to rerun the step with module calls observed: blocks need more than taps provide."""
        self.dispatcher.again()
        for request in self._active:
            request.again()
        self.sandboxes.again()

    def learn_route(self, run: Callable[[], Any], taps: Collection[int]) -> None:
        """Record the order of the model's module calls from one run, after which taps can serve blocks."""
        with self.model.observed_by(self.dispatcher):
            run()
        layers = f"{self.model.path}.{self._points.family.layers}"
        exits = [f"{layers}.{index}.output" for index in range(len(self._points.layers))]
        entry = f"{self.model.path}.{EMBED}"
        try:
            self.dispatcher.route = ModuleOrder(
                str(self.model.path), list(self.dispatcher.calls), exits, taps, entry
            )
            self.dispatcher.entry = self.dispatcher.route.exits.get(0, "")
        except ValueError as error:
            logger.warning("steps with blocks will run uncompiled: %s", error)
        self.dispatcher.calls.clear()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self.dispatcher.go_by_modules()
        with self.model.observed_by(self.dispatcher):
            yield

    def on_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Offer the logits, ``[requests, vocabulary]``; return them as the blocks leave them."""
        for request in self._active:
            request.after_model(logits.shape[0])
        self.sandboxes.after_model(logits.shape[0])
        value: torch.Tensor = self.dispatcher.provide(f"{self.model.path}.{LOGITS}.output", logits)
        return value

    def on_samples(self, samples: torch.Tensor) -> torch.Tensor:
        """Offer the sampled tokens, ``[requests, 1]``; return them as the blocks leave them."""
        value: torch.Tensor = self.dispatcher.provide(f"{self.model.path}.{SAMPLES}.output", samples)
        return value

    def end_step(self) -> list[str]:
        """End the step; return the requests that are to end because their blocks failed or stopped them.

        With sandboxed requests, other ranks first follow the worker with the blocks, then end the step too.
        """
        if self.known.sandboxed:
            ended: list[str] = self.dispatcher.jointly(self._end_traced_step)
            if self.dispatcher.runs_blocks:
                return ended
        return self._end_traced_step()

    def _end_traced_step(self) -> list[str]:
        """End the step of blocks on this worker and in sandboxes; return the requests that are to end."""
        for request in self._active:
            request.end_step()
        self._record_module_use()
        failed, self._sandbox_reports, waited_s = self.sandboxes.end_step()
        self._ended += failed
        self.dispatcher.end_step()
        spent_s = sum(request.spent_s for request in self._active)
        self.waited_s += spent_s - self._began_s + waited_s
        self._active, self._began_s, self.in_step = [], 0.0, False
        over = [request_id for request_id, request in self._live.items() if request.is_over]
        for request_id in over:
            self._live.pop(request_id).retire()
        ended, self._ended = [*self._ended, *over], []
        return ended

    def has_collected(self, key: str, results: Mapping[str, Any], wait_s: float) -> bool:
        """Wait up to ``wait_s`` for a sandboxed trace to close; return whether its result is ready."""
        is_ready: bool = self.dispatcher.jointly(
            lambda: not self.sandboxes.knows(key) or self.sandboxes.has_collected(key, results, wait_s)
        )
        return is_ready

    def _record_module_use(self) -> None:
        """After a request's first step, record whether its block needed more than taps provide."""
        for request_id, request in self._live.items():
            member = self.store.members[request_id]
            if request.number == 1 and member.context is not None and not member.is_known:
                member.is_known = True
                self._module_use.note(
                    member.context.code(member.entry.index), elsewhere=request.needed_modules
                )

    def reports(self) -> dict[str, Report]:
        """Return the reports of the last step, by request, for clients that read along."""
        reports, self._sandbox_reports = self._sandbox_reports, {}
        for request_id in self._live:
            if self.reporting.may_report(request_id):
                member = self.store.members[request_id]
                assert member.context is not None  # noqa: S101 - it is live
                report = self.reporting.report(
                    request_id, member.entry, partial(member.context.saves, member.entry.index)
                )
                if report is not None:
                    reports[request_id] = report
        return reports

    # Results.

    def collect(self, key: str, results: Mapping[str, Any], index: int | None = None) -> EndedTrace:
        """Close the blocks of an ended trace, or one of them (``index``), with its requests' results."""

        def collect() -> EndedTrace:
            for request_id in self.store.requests(key, index):
                self._live.pop(request_id, None)
            return self.store.collect(key, results, index)

        ended: EndedTrace = self.dispatcher.jointly(collect)
        return ended

    def drop(self, key: str) -> float:
        """Drop a trace without its results; return the seconds that the engine has waited for it."""

        def drop() -> float:
            for request_id in self.store.requests(key):
                self._live.pop(request_id, None)
            return self.store.drop(key)

        spent_s: float = self.dispatcher.jointly(drop)
        return spent_s
