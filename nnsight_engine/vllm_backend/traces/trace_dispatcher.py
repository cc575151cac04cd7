"""Where the model's calls and the traced requests of a step meet.

A worker has one model and many traced requests, each with a side of its own (see ``request``). The board is
what stands for all of them towards the model and the tree of envoys, like the interleaver of a single trace:
the probes of ``envoys`` offer it each module's values, and it lets the requests that wait have their rows, in
the order in which they came. Within a step one block runs at a time, of whichever request.
"""

from __future__ import annotations

import logging
import sys
import threading
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import torch

from nnsight_engine.core.trees import map_tensors, tensors
from nnsight_engine.interleaving.mediator import Mediator
from nnsight_engine.interleaving.module_use import ModuleUse
from nnsight_engine.vllm_backend.traces.module_order import UntappedError
from nnsight_engine.vllm_backend.traces.rows import RowSpan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from nnsight_engine.vllm_backend.traces.module_order import ModuleOrder
    from nnsight_engine.vllm_backend.traces.request import TracedRequest

logger = logging.getLogger(__name__)

_NEVER: Final = sys.maxsize
"""Stands for the next tap where there is none to stop at."""

_SEVERAL: Final = 2

_by_order = attrgetter("order")


class TraceDispatcher(ModuleUse):
    """The requests that wait, by what they wait for.

    Attributes:
        wanted: For each provider, the requests that have a use for it.
        calls: How often each provider was reached in this step.
        ever: Every provider that was reached in any step before.
        place: Where the model is.
        current: The block that is running; None while the model is.
        listener: The thread whose calls of modules are the model's own; 0 while none are.
        skipped: Always empty: a module runs for whoever does not skip it.
        route: Where the taps lie; None where there are none, or other workers would have to agree.
        entry: The place where the residual stream begins, if a tap lies there that serves blocks; else empty.
        next_tap: At no tap before this one is there anything to do.
        by_taps: Whether blocks are served at the taps in this step, and no module's call is heard of.
        is_uncompiled: Whether this step ran uncompiled, for whomever.
        gather: Waits for those that were offered a value and answer later; None where nobody does.
    """

    step = float("inf")
    """No module's call begins a step here; the engine does."""

    skipped: tuple[()] = ()

    def __init__(self) -> None:
        """Start without requests."""
        self.wanted: dict[str, dict[TracedRequest, None]] = {}
        self.calls: dict[str, int] = {}
        self.ever: set[str] = set()
        self.place = RowSpan()
        self.current: Mediator | None = None
        self.listener = 0
        self.interleaving = False
        self.route: ModuleOrder | None = None
        self.by_taps = False
        self.is_uncompiled = False
        self.entry = ""
        self.next_tap = 0
        self.gather: Callable[[], None] | None = None
        self._untapped: set[str] = set()
        self._tap = -1
        self._reach = 0
        self._seen: str | None = None
        self._is_past = False

    # What requests have a use for.

    def want(self, provider: str, request: TracedRequest) -> None:
        """Note that a request has a use for a provider's values."""
        self.wanted.setdefault(provider, {})[request] = None
        if self.route is not None and provider not in self.route.served:
            self._untapped.add(provider)

    def unwant(self, provider: str, request: TracedRequest) -> None:
        """Note that it has none any more."""
        wanting = self.wanted.get(provider)
        if wanting is not None:
            wanting.pop(request, None)
            if not wanting:
                del self.wanted[provider]
                self._untapped.discard(provider)

    def forget(self, request: TracedRequest) -> None:
        """Forget a request that has ended."""
        for provider in [provider for provider, wanting in self.wanted.items() if request in wanting]:
            self.unwant(provider, request)

    def is_known(self, provider: str) -> bool:
        """Tell whether any step has reached a provider."""
        route = self.route
        is_on_route = route is not None and provider in route.number_of
        return is_on_route or provider in self.ever or provider in self.calls

    def has_passed(self, provider: str) -> bool:
        """Tell whether this step has reached a provider."""
        if provider in self.calls:
            return True
        return self.route is not None and self.route.number_of.get(provider, self._reach) < self._reach

    def passed(self) -> list[str]:
        """Return the places that this step has reached, in order."""
        if self.route is None or not self._reach:
            return list(self.calls)
        if self.by_taps and self._reach < len(self.route.order):
            return list(self.route.order[: self._reach])
        return list(dict.fromkeys((*self.route.order[: self._reach], *self.calls)))

    def refusal(self, provider: str) -> Exception | None:  # noqa: ARG002 - a hook
        """Return why no block can have a provider's value; None if they can."""
        return None

    # What blocks do with modules, see ``ModuleUse``.

    def applied(
        self,
        path: str,
        apply: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        method: str = "",
    ) -> Any:
        """Apply the module at ``path``, or a method of it, to copies of what the block gives.

        vLLM's norms and rotary embeddings write into their arguments. Those that the model has made would
        count as edited by the block, and go back into the model.
        """
        args, kwargs = map_tensors((args, kwargs), torch.clone)
        return super().applied(path, apply, args, kwargs, method)

    def called_directly(self, path: str) -> None:
        """Refuse a block's call of the module at ``path`` that probes would hear of.

        Raises:
            ValueError: The call is a block's.
        """
        if self.current is not None:
            raise ValueError(
                f"`{path}` cannot be called with hook=True inside vLLM: other requests wait for the model's "
                "own calls of it. Call it without."
            )

    # What the model provides.

    def begin(self) -> None:
        """Begin a step."""
        self.ever.update(self.calls)
        self.calls.clear()
        self.interleaving = True
        self.by_taps = self._is_past = self.is_uncompiled = False
        self._seen = None
        self._tap = -1
        self._reach = 0
        self.next_tap = 0

    def listen(self) -> None:
        """Hear this thread's calls: the model runs."""
        self.listener = threading.get_ident()

    def pause(self) -> None:
        """Hear nothing any more: the model has run."""
        self.listener = 0

    def end(self) -> None:
        """End the step."""
        self.interleaving = False

    def offer(self, provider: str, number: int | None, value: Any) -> Any:  # noqa: ARG002 - each request counts for itself
        """Let the requests that wait for a value have their rows; returns it as they leave it."""
        self.place.enter(provider, value)
        for request in self._wanting(provider):
            request.arrive(provider)
        if self._seen is not None and (self._is_past or provider == self._seen):
            self._is_past = self._is_past and provider != self._seen
            return self.place.leave()
        served = self._serve(provider)
        if self.route is not None and provider not in self.route.served:
            for request in served:
                request.went_elsewhere = True
        for request in served:  # no sooner: one may have released another from a barrier
            request.leave(provider)
        for request in self._wanting(provider):
            request.watch_pass(provider)
        return self.place.leave()

    def _serve(self, provider: str) -> list[TracedRequest]:
        """Let those have the value at hand who wait for it; returns them."""
        served: dict[TracedRequest, None] = {}
        more = True
        while more:
            more = False
            for request in self._wanting(provider):
                if request.is_due(provider):
                    request.serve(provider)
                    served[request] = None
                    more = more or not request.partial
            if more and self.gather is not None:
                self.gather()
        return list(served)

    def provide(self, provider: str, value: Any) -> Any:
        """Provide a value that no module's call makes."""
        if provider in self.wanted:
            value = self.offer(provider, None, value)
        self.calls[provider] = 1
        return value

    # A step that is served at the taps.

    def choose(self, requests: Iterable[Any]) -> None:
        """Choose how this step is run: by the taps if, as far as can be told, they have all that is wanted.

        Args:
            requests: Those that take part in it.
        """
        likely = not any(request.is_elsewhere for request in requests)
        self.by_taps = self.route is not None and likely and not self._users_of_modules()
        if self.by_taps:
            self._look_ahead()

    def _look_ahead(self) -> None:
        """Find the next tap behind this one at which somebody waits; the last one tells that it is there."""
        assert self.route is not None  # noqa: S101 - without one there is no such step
        waiting = [self.route.tap_at.get(provider, -1) for provider in self.wanted]
        self.next_tap = min((tap for tap in waiting if tap > self._tap), default=self.route.last)

    def _users_of_modules(self) -> list[TracedRequest]:
        return [
            request
            for provider in self._untapped
            for request in self.wanted.get(provider, ())
            if request.uses(provider)
        ]

    def at_tap(self, tap: int, value: Any) -> None:
        """The model has come to a tap, with a value that may be changed in place.

        Raises:
            UntappedError: Blocks go on to want what no tap provides.
        """
        assert self.route is not None  # noqa: S101 - without one there is no such step
        provider = self.route.exits[tap]
        if not self.by_taps:
            self._at_tap_among_modules(provider, value)
            return
        self._tap, self._reach = tap, self.route.ahead[tap]
        self._offer_in_place(provider, value)
        self._reach += 1
        users = self._users_of_modules()
        for request in users:
            request.went_elsewhere = True
        if users:
            raise UntappedError
        self._look_ahead()

    def _at_tap_among_modules(self, provider: str, value: Any) -> None:
        """Come to a tap where modules are heard of, which have all places but the first tap's."""
        if provider == self.entry:
            self._offer_in_place(provider, value)
            self.calls[provider] = 1
        self._is_past = self._is_past and provider != self._seen
        self.next_tap = self._tap if self._is_past else _NEVER

    def _offer_in_place(self, provider: str, value: Any) -> None:
        if provider not in self.wanted:
            return
        left = self.offer(provider, None, value)
        if left is not value:
            for old, new in zip(tensors(value), tensors(left), strict=True):
                if new is not old:
                    old.copy_(new)

    def at_end(self) -> None:
        """The model has run by the taps.

        Raises:
            UntappedError: It never came to them.
        """
        assert self.route is not None  # noqa: S101 - as above
        if self._tap != self.route.last:
            logger.error("the compiled model has lost its taps; please report this with the model's name")
            raise UntappedError
        self._reach = len(self.route.order)

    def again(self) -> None:
        """The step is run again, with the modules heard of: blocks go on where it was left."""
        assert self.route is not None  # noqa: S101 - as above
        self.go_by_modules()
        self._seen = self.route.exits.get(self._tap)
        self._is_past = self._seen is not None

    def go_by_modules(self) -> None:
        """Hear of modules in this step."""
        self.by_taps = False
        self.next_tap = 0

    def _wanting(self, provider: str) -> list[TracedRequest]:
        wanting = self.wanted.get(provider, ())
        return list(wanting) if len(wanting) < _SEVERAL else sorted(wanting, key=_by_order)

    def fail(self, provider: str, error: Exception) -> None:
        """End the requests that have a use for a value which cannot be had."""
        for request in self._wanting(provider):
            if request.uses(provider):
                request.failed(error)
                request.wanted.clear()

    def handle(self, provider: str | None = None, value: Any = None, iterate: bool = False) -> Any:  # noqa: ARG002, FBT001, FBT002 - the documented signature
        """Provide a value, as an envoy's own code may."""
        return value if provider is None else self.provide(provider, value)

    # What envoys and tracers ask of the running block's side.

    def __getattr__(self, name: str) -> Any:
        """Return what the running block's request knows."""
        current = self.__dict__.get("current")
        if current is None or current.interleaver is None:
            raise AttributeError(f"no block is running, so there is no {name!r}", name=name, obj=self)
        return getattr(current.interleaver, name)
