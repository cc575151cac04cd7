"""Tensor-parallel ranks: the leading one runs the blocks and sends orders, which the others execute.

Where a block waits for a sharded value, all ranks stop and gather the whole. Changed tensors are broadcast,
and each rank continues with its part of them; after reads only, with the tensors that it already had,
unchanged. A module that a block calls is called on all ranks. Ranks stop only at announced places, so steps
without a block need no communication between ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from nnsight_engine.core.trees import map_tensors, tensors
from nnsight_engine.interleaving.threads import ThreadMediator
from nnsight_engine.serialization.message import Piece
from nnsight_engine.vllm_backend.traces.errors import SpreadModuleError
from nnsight_engine.vllm_backend.traces.messages import CallOrder
from nnsight_engine.vllm_backend.traces.model import WorkerModel
from nnsight_engine.vllm_backend.traces.peer_traces import PeerTraces
from nnsight_engine.vllm_backend.traces.ranks import (
    ContinueOrder,
    FetchOrder,
    GatherOrder,
    Ranks,
    TpCollectives,
    slot_of_rank,
)
from nnsight_engine.vllm_backend.traces.rows import plain
from nnsight_engine.vllm_backend.traces.step_facts import KnownRequests, StepFacts
from nnsight_engine.vllm_backend.traces.trace_dispatcher import TraceDispatcher
from nnsight_engine.vllm_backend.traces.worker_traces import WorkerTraces

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from nnsight_engine.envoys.envoy import Envoy
    from nnsight_engine.vllm_backend.compat import EngineLimits
    from nnsight_engine.vllm_backend.model_points import ModelPoints
    from nnsight_engine.vllm_backend.traces.request import TraceSpan
    from nnsight_engine.vllm_backend.traces.sandboxed.sandbox_pool import SandboxPool


@dataclasses.dataclass(slots=True)
class _Turn:
    changed: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    is_true: bool = False


class TpLeaderDispatcher(TraceDispatcher):
    spread: TpCollectives
    sandboxes: SandboxPool

    def __init__(self) -> None:
        super().__init__()
        self._depth = 0
        self._announced: frozenset[str] = frozenset()

    @contextlib.contextmanager
    def leading(self) -> Iterator[_Turn]:
        """Lead the other ranks, which wait for orders until the outermost context exits."""
        turn = _Turn()
        self._depth += 1
        try:
            yield turn
        finally:
            self._depth -= 1
            if not self._depth:
                self._let_continue(turn)

    def _let_continue(self, turn: _Turn) -> None:
        self._announced = frozenset(
            provider
            for provider, requests in self.wanted.items()
            if any(request.in_step for request in requests)
        )
        changes = [slot_of_rank(tensor, number) for number, tensor in turn.changed.items()]
        order = ContinueOrder(list(self._announced), changes, turn.is_true, list(self.sandboxes.undone))
        self.spread.ranks.broadcast(order, list(turn.changed.values()))

    # Values for blocks.

    def refusal(self, provider: str) -> Exception | None:
        return super().refusal(provider) or self.spread.refusal(provider)

    def offer(self, provider: str, number: int | None, value: Any) -> Any:
        """Give waiting requests their rows of the whole; return this rank's part of the result.

        SpreadModuleError if a block made the call itself, which the other ranks do not take part in.
        """
        if self.current is not None:
            raise SpreadModuleError.direct_call(provider)
        if provider not in self._announced:
            return value  # the requests that want it take no part in this step
        with self.leading() as turn:
            if not any(request.uses(provider) for request in self.wanted.get(provider, ())):
                return value
            try:
                whole = self._whole(provider, value)
            except SpreadModuleError as error:
                self.fail(provider, error)
                return value
            turn.changed = _changed(whole, super().offer(provider, number, whole))
            return self.spread.with_parts(provider, value, turn.changed) if turn.changed else value

    def _whole(self, provider: str, value: Any) -> Any:
        if not self.spread.is_spread(provider):
            return value
        self.spread.check(provider, value)
        self.spread.ranks.broadcast(GatherOrder())
        return self.spread.whole(provider, value)

    # Use of modules by blocks.

    def applied(
        self,
        path: str,
        apply: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        method: str = "",
    ) -> Any:
        if not self.spread.shards.needs_all(path):
            return super().applied(path, apply, args, kwargs, method)
        self.spread.check_call(path, method)
        adapter = self.spread.adapters.current  # of this thread, which is not the model's
        return self._on_models_thread(lambda: self._call(path, method, args, kwargs, adapter), path)

    def call_module(self, envoy: Envoy, *args: torch.Tensor) -> Any:
        """Call a module for a block in another process; SpreadModuleError if the other ranks cannot join."""
        path = str(envoy.path)
        if not self.spread.shards.needs_all(path):
            return super().call_module(envoy, *args)
        self.spread.check_call(path, "")
        if not self._depth:
            raise SpreadModuleError.outside(path)
        return self._call(path, "", args, {}, self.spread.adapters.current)

    def _call(
        self, path: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], adapter: int | None
    ) -> Any:
        args, kwargs = map_tensors((args, kwargs), lambda tensor: plain(tensor).clone())
        self.spread.ranks.broadcast_call(path, method, args, kwargs, adapter)
        return self.spread.call(path, method, args, kwargs, adapter)

    def called_directly(self, path: str) -> None:
        """Raise SpreadModuleError for a sharded module: only this rank would make the call."""
        if self.spread.shards.needs_all(path):
            raise SpreadModuleError.direct_call(path)
        super().called_directly(path)

    def whole_tensor(self, path: str, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the module at ``path``, gathered to the whole if each rank has a part."""
        if not self.spread.shards.has_parts(path):
            return value
        if not self.spread.shards.held(path, name, value).is_spread:
            return value

        def fetch() -> torch.Tensor:
            self.spread.ranks.broadcast(FetchOrder(path, name))
            return self.spread.fetch(path, name)

        whole: torch.Tensor = self._on_models_thread(fetch, f"{path}.{name}")
        return whole

    def _on_models_thread(self, act: Callable[[], Any], what: str) -> Any:
        """Do something jointly with all ranks, which accept orders while a block runs."""
        mediator = self.current
        if not isinstance(mediator, ThreadMediator) or not self._depth:
            raise SpreadModuleError.outside(what)
        return mediator.on_models_thread(act, what)


def _changed(before: Any, after: Any) -> dict[int, torch.Tensor]:
    pairs = zip(tensors(before), tensors(after), strict=True)
    return {number: new for number, (old, new) in enumerate(pairs) if new is not old}


class TpLeaderTraces(WorkerTraces):
    """The traced requests of a model, on the rank that runs their blocks.

    A sandbox process may request a module's call whenever the worker reads its messages. So while there are
    sandboxed requests, the other ranks accept orders in each phase of a step in which messages are read.
    """

    dispatcher: TpLeaderDispatcher

    def __init__(self, points: ModelPoints, config: VllmConfig, ranks: Ranks, limits: EngineLimits) -> None:
        super().__init__(points, config, limits, dispatcher=TpLeaderDispatcher())
        self._known = KnownRequests()
        self.dispatcher.spread = TpCollectives(ranks, self.model, points)
        self.dispatcher.sandboxes = self.sandboxes

    @property
    def idle(self) -> bool:
        """Whether there is no traced request; the ranks agree on it."""
        return not self._known.present

    def takes_part(self, request_id: str) -> bool:
        """Return whether a request is traced; the ranks agree on it."""
        return request_id in self._known.present

    def adopt(self, data: bytes) -> dict[str, Any] | None:
        failure = super().adopt(data)
        self.dispatcher.spread = TpCollectives(self.dispatcher.spread.ranks, self.model, self._points)
        return failure

    def begin(self, facts: StepFacts) -> None:
        self.sandboxes.is_single_tenant = facts.is_single_tenant
        if self._known.note(facts) or self._known.sandboxed:
            with self.dispatcher.leading():
                super().begin(facts)

    def step(self, spans: Sequence[TraceSpan], num_rows: int) -> bool:
        if not spans:
            return False
        with self.dispatcher.leading() as turn:
            live = [span for span in spans if self.has_block(span.request_id)]
            turn.is_true = super().step(live, num_rows)
            return turn.is_true

    def end(self) -> list[str]:
        if not self._known.sandboxed:
            return super().end()
        with self.dispatcher.leading():
            return super().end()

    def wait_for_any(self, wait_s: float) -> None:
        if self._known.sandboxed:
            with self.dispatcher.leading():
                super().wait_for_any(wait_s)
        elif self.throttled:
            time.sleep(wait_s)  # the rest ends without an answer

    def has_collected(self, key: str, results: Mapping[str, Any], wait_s: float) -> bool:
        with self.dispatcher.leading() as turn:
            turn.is_true = super().has_collected(key, results, wait_s)
            return turn.is_true

    def collect(self, key: str, results: Mapping[str, Any], index: int | None = None) -> list[Piece]:
        with self.dispatcher.leading():
            return super().collect(key, results, index)

    def drop(self, key: str) -> float | None:
        with self.dispatcher.leading():
            return super().drop(key)


logger = logging.getLogger(__name__)


class TpFollowerDispatcher(TraceDispatcher):
    """Stops the model where the leading rank's blocks may read or change a value."""

    spread: TpCollectives

    def __init__(self) -> None:
        super().__init__()
        self.undone: Sequence[str] = ()
        self._is_true = False

    def offer(self, provider: str, number: int | None, value: Any) -> Any:  # noqa: ARG002 - as on the other side
        return self.follow(provider, value)

    def follow(self, provider: str = "", value: Any = None) -> Any:
        """Execute the leading rank's orders until it lets the model continue."""
        ranks = self.spread.ranks
        while True:
            order, content = ranks.next_order()
            if isinstance(order, ContinueOrder):
                self._is_true, self.undone = order.is_true, order.undone
                # Probes hold a reference to this dictionary, so it is changed in place.
                self.wanted.clear()
                self.wanted.update({name: {} for name in order.wanted or ()})
                changed = {slot.number: content.next(slot) for slot in order.changes}
                return self.spread.with_parts(provider, value, changed) if changed else value
            if isinstance(order, CallOrder):
                self._call(order, *content.arguments(order))
            elif isinstance(order, FetchOrder):
                self.spread.fetch(order.path, order.name)
            else:
                self.spread.whole(provider, value)

    def follow_to_answer(self) -> bool:
        """Execute the leading rank's orders, and return the answer with which it lets the model continue."""
        self.follow()
        return self._is_true

    def _call(self, order: CallOrder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Calls made inside do not count as the model's own calls.
        listener, self.listener = self.listener, 0
        try:
            self.spread.call(order.path, order.method, args, kwargs, order.adapter)
        except Exception:
            # The leading rank raises the same error in the block.
            logger.debug("a module could not be called for a block", exc_info=True)
        finally:
            self.listener = listener


class TpFollowerTraces(PeerTraces):
    """Executes the leading rank's orders in each phase in which that rank may send some."""

    dispatcher: TpFollowerDispatcher

    def __init__(self, points: ModelPoints, config: VllmConfig, ranks: Ranks) -> None:
        dispatcher = TpFollowerDispatcher()
        super().__init__(dispatcher, WorkerModel(points, config, dispatcher))
        dispatcher.spread = TpCollectives(ranks, self.model, points)

    @property
    def undone(self) -> Sequence[str]:
        return self.dispatcher.undone

    def begin(self, facts: StepFacts) -> None:
        if self.known.note(facts) or self.known.sandboxed:
            self.dispatcher.follow()

    def step(self, spans: Sequence[TraceSpan], num_rows: int) -> bool:
        del num_rows
        if spans:
            self.in_step = self.dispatcher.follow_to_answer()
            self.defers = not self.known.sandboxed.isdisjoint(span.request_id for span in spans)
        return self.in_step

    def end(self) -> list[str]:
        if self.known.sandboxed:
            self.dispatcher.follow()
        self.in_step = self.defers = False
        self.dispatcher.undone = ()
        self.dispatcher.wanted.clear()
        return []

    def wait_for_any(self, wait_s: float) -> None:
        del wait_s
        if self.known.sandboxed:
            self.dispatcher.follow()

    def has_collected(self, key: str, results: Mapping[str, Any], wait_s: float) -> bool:
        del key, results, wait_s
        return self.dispatcher.follow_to_answer()

    def collect(self, key: str, results: Mapping[str, Any], index: int | None = None) -> list[Piece]:
        self.dispatcher.follow()
        return super().collect(key, results, index)

    def drop(self, key: str) -> None:
        self.dispatcher.follow()
        super().drop(key)
