"""Tensor-parallel ranks: the leading one runs the blocks and sends orders, which the others execute.

Where a block waits for a sharded value, all ranks stop and gather the whole. Changed tensors are broadcast,
and each rank continues with its part of them; after reads only, with the tensors that it already had,
unchanged. A module that a block calls is called on all ranks. Ranks stop only at announced places, so steps
without a block need no communication between ranks.

A sandbox process may request a module's call whenever the worker reads its messages. So while there are
sandboxed requests, the other ranks accept orders in each phase of a step in which messages are read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch

from nnsight_engine.core.trees import map_tensors, tensors
from nnsight_engine.interleaving.threads import ThreadMediator
from nnsight_engine.vllm_backend.traces.block_adapters import block_adapters
from nnsight_engine.vllm_backend.traces.errors import SpreadModuleError
from nnsight_engine.vllm_backend.traces.messages import CallOrder
from nnsight_engine.vllm_backend.traces.ranks import (
    ContinueOrder,
    FetchOrder,
    GatherOrder,
    Ranks,
    slot_of_rank,
)
from nnsight_engine.vllm_backend.traces.rows import plain
from nnsight_engine.vllm_backend.traces.shards import Shards, map_numbered
from nnsight_engine.vllm_backend.traces.trace_dispatcher import TraceDispatcher

if TYPE_CHECKING:
    from nnsight_engine.envoys.envoy import Envoy
    from nnsight_engine.vllm_backend.model_points import ModelPoints

logger = logging.getLogger(__name__)

_ITSELF: Final = frozenset({"", "forward"})
"""Method names that mean calling the module itself."""


class RankDispatcher(TraceDispatcher):
    """What all ranks do together, each for its part of the model."""

    is_joint = True

    def __init__(self, ranks: Ranks, points: ModelPoints) -> None:
        super().__init__()
        self.ranks = ranks
        self.adapters = block_adapters(points.model)
        self._points = points

    @functools.cached_property
    def shards(self) -> Shards:
        return Shards(self._points, self.model.own_modules())

    def _gathered(self, provider: str, value: Any) -> Any:
        return self.shards.location_of(provider).whole(value, self.ranks.gather)

    def _with_parts(self, provider: str, value: Any, changed: Mapping[int, torch.Tensor]) -> Any:
        """Return this rank's part with some tensors replaced; ``changed`` are whole tensors, by number."""
        if not changed:
            return value
        place = self.shards.location_of(provider)

        def put_in(number: int, part: torch.Tensor) -> torch.Tensor:
            whole, layout = changed.get(number), place.layout_of(number)
            if whole is None or layout is None:
                return part if whole is None else whole
            return layout.part(whole, self.ranks.rank, self.ranks.size)

        return map_numbered(value, put_in)

    def _called(
        self, path: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], adapter: int | None
    ) -> Any:
        """Call a module, or its ``method``, with this rank's parts of whole values; return the whole."""
        envoy = self.model.get(path)
        # As on a block's own thread.
        with torch.inference_mode(mode=False), torch.no_grad(), self.adapters.using(adapter):
            if method not in _ITSELF:
                return getattr(envoy._module, method)(*args, **kwargs)  # noqa: SLF001 - an envoy of ours
            entrance, exit_ = (
                self.shards.location_of(f"{path}.input"),
                self.shards.location_of(f"{path}.output"),
            )
            args, kwargs = entrance.part((args, kwargs), self.ranks.rank, self.ranks.size)
            output = envoy._apply_to_values(*args, **kwargs)  # noqa: SLF001 - the same
            return exit_.whole(output, self.ranks.gather)

    def _fetched(self, path: str, name: str) -> torch.Tensor:
        """Return the whole of a module's tensor; SpreadModuleError if its sharding is not known."""
        part: torch.Tensor = getattr(self.model.get(path)._module, name)  # noqa: SLF001 - an envoy of ours
        with torch.inference_mode(mode=False), torch.no_grad():
            whole: torch.Tensor = self.shards.held(path, name, part).whole(part, self.ranks.gather)
            return whole


@dataclasses.dataclass(slots=True)
class _Turn:
    """What the other ranks get when they continue: changed whole tensors, by number, and an answer."""

    changed: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    is_true: bool = False


class LeadingDispatcher(RankDispatcher):
    def __init__(self, ranks: Ranks, points: ModelPoints) -> None:
        super().__init__(ranks, points)
        self._depth = 0
        self._announced: frozenset[str] = frozenset()

    @contextlib.contextmanager
    def _leading(self) -> Iterator[_Turn]:
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
        """Let the other ranks continue to the places announced here: those that blocks in this step want."""
        self._announced = frozenset(
            provider
            for provider, requests in self.wanted.items()
            if any(request.in_step for request in requests)
        )
        changes = [slot_of_rank(tensor, number) for number, tensor in turn.changed.items()]
        order = ContinueOrder(list(self._announced), changes, turn.is_true, list(self.undone))
        self.ranks.broadcast(order, list(turn.changed.values()))

    def jointly(self, act: Callable[[], Any]) -> Any:
        """Return what ``act`` returns; the other ranks execute orders meanwhile, and get ``is_true``."""
        with self._leading() as turn:
            answer = act()
            turn.is_true = answer is True
            return answer

    # Values for blocks.

    def refusal(self, provider: str) -> Exception | None:
        """Return why no block can have a value, as one of unknown sharding; None if blocks can."""
        refusal = super().refusal(provider)
        if refusal is None and not self.shards.is_understood(provider):
            return SpreadModuleError.unknown_layout(provider)
        return refusal

    def offer(self, provider: str, number: int | None, value: Any) -> Any:
        """Give waiting requests their rows of the whole; return this rank's part of the result.

        SpreadModuleError if a block made the call itself, which the other ranks do not take part in.
        """
        if self.current is not None:
            raise SpreadModuleError.direct_call(provider)
        if provider not in self._announced:
            return value  # the requests that want it take no part in this step
        with self._leading() as turn:
            if not any(request.uses(provider) for request in self.wanted.get(provider, ())):
                return value
            try:
                whole = self._gather_whole(provider, value)
            except SpreadModuleError as error:
                self.fail(provider, error)
                return value
            turn.changed = _changed(whole, super().offer(provider, number, whole))
            return self._with_parts(provider, value, turn.changed)

    def _gather_whole(self, provider: str, value: Any) -> Any:
        """Return the whole; SpreadModuleError if the value is not sharded as the layout of its place says."""
        place = self.shards.location_of(provider)
        if not place.is_spread:
            return value
        if not place.fits(list(tensors(value))):
            raise SpreadModuleError.unknown_layout(provider)
        self.ranks.broadcast(GatherOrder())
        return self._gathered(provider, value)

    # Use of modules by blocks.

    def applied(
        self,
        path: str,
        apply: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        method: str = "",
    ) -> Any:
        """Apply a module, or its ``method``, to a block's values: on all ranks together if it is sharded."""
        if not self.shards.needs_all(path):
            return super().applied(path, apply, args, kwargs, method)
        self._check_call(path, method)
        adapter = self.adapters.current  # of this thread, which is not the model's
        return self._on_models_thread(lambda: self._call(path, method, args, kwargs, adapter), path)

    def call_module(self, envoy: Envoy, *args: torch.Tensor) -> Any:
        """Call a module for a block in another process; SpreadModuleError if the other ranks cannot join."""
        path = str(envoy.path)
        if not self.shards.needs_all(path):
            return super().call_module(envoy, *args)
        self._check_call(path, "")
        if not self._depth:
            raise SpreadModuleError.outside_block(path)
        return self._call(path, "", args, {}, self.adapters.current)

    def _check_call(self, path: str, method: str) -> None:
        """Raise SpreadModuleError if it is not known how the input or the output is sharded."""
        for provider in (f"{path}.input", f"{path}.output"):
            if not self.shards.is_understood(provider):
                raise SpreadModuleError.unknown_layout(provider)
        if method not in _ITSELF and (self.shards.has_parts(path) or hasattr(torch.nn.Module, method)):
            raise SpreadModuleError.method(path, method)

    def _call(
        self, path: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], adapter: int | None
    ) -> Any:
        """Call a module on all ranks, on copies of the block's tensors; the model's thread does this."""
        args, kwargs = map_tensors((args, kwargs), lambda tensor: plain(tensor).clone())
        self.ranks.broadcast_call(path, method, args, kwargs, adapter)
        return self._called(path, method, args, kwargs, adapter)

    def called_directly(self, path: str) -> None:
        """Raise SpreadModuleError for a sharded module: only this rank would make the call."""
        if self.shards.needs_all(path):
            raise SpreadModuleError.direct_call(path)
        super().called_directly(path)

    def whole_tensor(self, path: str, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the module at ``path``, gathered to the whole if each rank has a part."""
        if not self.shards.has_parts(path) or not self.shards.held(path, name, value).is_spread:
            return value

        def fetch() -> torch.Tensor:
            self.ranks.broadcast(FetchOrder(path, name))
            return self._fetched(path, name)

        whole: torch.Tensor = self._on_models_thread(fetch, f"{path}.{name}")
        return whole

    def _on_models_thread(self, act: Callable[[], Any], name: str) -> Any:
        """Do something jointly with all ranks, which accept orders while a block runs."""
        mediator = self.current
        if not isinstance(mediator, ThreadMediator) or not self._depth:
            raise SpreadModuleError.outside_block(name)
        return mediator.on_models_thread(act, name)


def _changed(before: Any, after: Any) -> dict[int, torch.Tensor]:
    pairs = zip(tensors(before), tensors(after), strict=True)
    return {number: new for number, (old, new) in enumerate(pairs) if new is not old}


class FollowingDispatcher(RankDispatcher):
    """Stops the model where the leading rank's blocks may read or change a value."""

    runs_blocks = False

    def end_step(self) -> None:
        super().end_step()
        self.wanted.clear()

    def jointly(self, act: Callable[[], Any]) -> Any:
        del act
        order, _ = self._follow("", None)
        return order.is_true

    def offer(self, provider: str, number: int | None, value: Any) -> Any:
        del number
        _, changed = self._follow(provider, value)
        return self._with_parts(provider, value, changed)

    def _follow(self, provider: str, value: Any) -> tuple[ContinueOrder, dict[int, torch.Tensor]]:
        """Execute the leading rank's orders until it lets the model continue, with changed tensors."""
        while True:
            order, content = self.ranks.next_order()
            if isinstance(order, ContinueOrder):
                self.undone = order.undone
                # Probes hold a reference to this dictionary, so it is changed in place.
                self.wanted.clear()
                self.wanted.update({name: {} for name in order.wanted or ()})
                return order, {slot.number: content.next(slot) for slot in order.changes}
            if isinstance(order, CallOrder):
                self._follow_call(order, *content.arguments(order))
            elif isinstance(order, FetchOrder):
                self._fetched(order.path, order.name)
            else:
                self._gathered(provider, value)

    def _follow_call(self, order: CallOrder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Make a module call together with the leading rank, which alone uses the result."""
        # Calls made inside do not count as the model's own calls.
        listener, self.listener = self.listener, 0
        try:
            self._called(order.path, order.method, args, kwargs, order.adapter)
        except Exception:
            # The leading rank raises the same error in the block.
            logger.debug("a module could not be called for a block", exc_info=True)
        finally:
            self.listener = listener
