"""The dispatcher between the model's calls and the traced requests of a step.

Towards the model and the tree of envoys it represents all participants, as the interleaver does for a single
trace: the probes of ``envoys`` offer it each module's values, and it gives the waiting requests their rows,
in the order in which they arrived. Within a step one block runs at a time in this process, across all
requests. A participant's blocks may also run in another process.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from operator import attrgetter
from types import CodeType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

import torch

from nnsight_engine.core.trees import map_tensors, tensors
from nnsight_engine.interleaving.interleaver import ModuleUse
from nnsight_engine.interleaving.mediator import Mediator
from nnsight_engine.vllm_backend.traces.errors import SeveralStreamsError
from nnsight_engine.vllm_backend.traces.rows import RowSpan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from nnsight_engine.envoys.envoy import Envoy
    from nnsight_engine.vllm_backend.traces.model import WorkerModel
    from nnsight_engine.vllm_backend.traces.request import TraceSpan

_BEHIND: Final = ("logits.output", "samples.output")
"""Places whose values are provided after the model has run, in compiled and eager steps alike."""


class UntappedError(Exception):
    """Blocks of the running step need a value that no tap provides; the step must run again, uncompiled."""


class ModuleOrder:
    """The order in which a model without branches passes its places; ValueError if exits are out of order.

    Module calls are not observed in a compiled step, but their order is the same in every step: recorded once
    when the engine starts, it tells which places lie before a tap.

    Args:
        order: All places, in the order in which a step first reaches them.
        exits: The outputs of the layers. A tap may lie behind each of them, and another in the first layer.
        taps: The numbers of the installed taps; 0 is the tap in the first layer, at the place ``entry``.

    Attributes:
        served: The providers whose values blocks can have without module calls being observed.
        ahead: The number of places that a step has passed when it reaches a tap, without the tap's own place.
    """

    def __init__(
        self, root: str, order: Sequence[str], exits: Sequence[str], taps: Collection[int], entry: str
    ) -> None:
        """Number the places; ValueError if a step does not pass the exits of the layers in order."""
        entrance = f"{exits[0].removesuffix('.output')}.input"
        # The tap in the first layer lies directly behind the layer's input.
        order = [name for place in order for name in ((place, entry) if place == entrance else (place,))]
        tap_places = (entry, *exits)
        number_of = {place: number for number, place in enumerate(order)}
        missing = [place for place in tap_places if place not in number_of]
        ahead = [number_of[place] for place in tap_places if place in number_of]
        if missing or ahead != sorted(ahead):
            raise ValueError(f"the model does not run its layers in order; it never reached {missing}")
        self.order = tuple(order)
        self.number_of: Mapping[str, int] = number_of
        self.exits = {tap: tap_places[tap] for tap in taps}
        self.tap_at = {place: tap for tap, place in self.exits.items()}
        self.ahead = {tap: ahead[tap] for tap in taps}
        self.last = max(taps)
        behind = (f"{root}.{name}" for name in _BEHIND)
        self.served = frozenset([*self.exits.values(), "result", *behind])


_MAX_KNOWN: Final = 256
"""Maximum number of blocks; beyond it the oldest are evicted."""


class ModuleUsePredictor:
    """The blocks that needed a value that no tap provides, in the first step of their latest request.

    Otherwise the need for a value inside a layer is only found at a tap, and the step has to run twice.
    """

    def __init__(self) -> None:
        self._elsewhere: dict[CodeType, None] = {}

    def expects_modules(self, block: CodeType) -> bool:
        return block in self._elsewhere

    def note(self, block: CodeType, *, elsewhere: bool) -> None:
        """Record whether a block needed a value ``elsewhere`` than at a tap."""
        self._elsewhere.pop(block, None)
        if elsewhere:
            self._elsewhere[block] = None
            if len(self._elsewhere) > _MAX_KNOWN:
                del self._elsewhere[next(iter(self._elsewhere))]


logger = logging.getLogger(__name__)

_NEVER: Final = sys.maxsize
"""The value of ``next_tap`` if the model need not stop at any tap."""

_by_order = attrgetter("order")


class TraceDispatcher(ModuleUse):
    """The waiting requests, indexed by the providers that they wait for.

    There is one in every worker. Of several ranks or stages, one ``runs_blocks``; the others offer it their
    part of the model's values. Subclasses say how the workers agree.

    Attributes:
        runs_blocks: Whether the blocks of traces run on this worker.
        is_joint: Whether other workers take the same decisions, so that only ``StepFacts`` may decide.
        model: The tree of envoys.
        undone: The requests whose rows of the running step are discarded: it runs without their blocks.
        ever: Every provider that was reached in any earlier step.
        current: The running block; None while the model runs.
        listener: The id of the thread whose module calls are the model's own; 0 while none are.
        skipped: Always empty: a module still runs for the requests that do not skip it.
        route: The order of the places and taps; None without taps, or if other workers would have to agree.
        entry: The place where the residual stream begins, if a tap there serves blocks; else empty.
        next_tap: The first tap at which something is to be done; earlier taps can be passed.
        by_taps: Whether blocks are served at the taps in this step, and module calls are not observed.
        streams: The places of several residual streams at once, which blocks cannot have.
        held: The paths of modules that keep what they compute for the running step.
        gather: Waits for sandbox sessions that were offered a value; None if there are none.
    """

    step = float("inf")
    """Infinite, because no module's call begins a step here; the engine begins it."""

    skipped: tuple[()] = ()
    runs_blocks: ClassVar[bool] = True
    is_joint: ClassVar[bool] = False
    model: WorkerModel

    def __init__(self) -> None:
        self.undone: Sequence[str] = ()
        self.wanted: dict[str, dict[Participant, None]] = {}
        self.calls: dict[str, int] = {}
        self.ever: set[str] = set()
        self.place = RowSpan()
        self.streams = frozenset[str]()
        self.held = frozenset[str]()
        self.current: Mediator | None = None
        self.listener = 0
        self.interleaving = False
        self.route: ModuleOrder | None = None
        self.by_taps = False
        self.is_uncompiled = False
        self.entry = ""
        self.next_tap = 0
        self.gather: Callable[[], None] | None = None
        self._untapped: set[str] = set()  # wanted providers that no tap serves
        self._tap = -1  # the last tap that the step has reached
        self._reach = 0  # the number of places in ``route`` that it has passed
        # Of a step that is rerun: the place until which blocks were served, and whether it is ahead.
        self._served_until: str | None = None
        self._is_catching_up = False

    # Registration of uses.

    def want(self, provider: str, request: Participant) -> None:
        self.wanted.setdefault(provider, {})[request] = None
        if self.route is not None and provider not in self.route.served:
            self._untapped.add(provider)

    def unwant(self, provider: str, request: Participant) -> None:
        """Remove a request from those that want a provider's values."""
        wanting = self.wanted.get(provider)
        if wanting is not None:
            wanting.pop(request, None)
            if not wanting:
                del self.wanted[provider]
                self._untapped.discard(provider)

    def forget(self, request: Participant) -> None:
        for provider in [provider for provider, wanting in self.wanted.items() if request in wanting]:
            self.unwant(provider, request)

    def is_known(self, provider: str) -> bool:
        route = self.route
        is_on_route = route is not None and provider in route.number_of
        return is_on_route or provider in self.ever or provider in self.calls

    def has_passed(self, provider: str) -> bool:
        if provider in self.calls:
            return True
        return self.route is not None and self.route.number_of.get(provider, self._reach) < self._reach

    def passed(self) -> list[str]:
        """Return the places that the step has passed, in order, known from its taps or observed calls."""
        if self.route is None or not self._reach:
            return list(self.calls)
        if self.by_taps and self._reach < len(self.route.order):
            return list(self.route.order[: self._reach])
        return list(dict.fromkeys((*self.route.order[: self._reach], *self.calls)))

    def refusal(self, provider: str) -> Exception | None:
        """Return why no block can have a provider's value; None if blocks can."""
        return SeveralStreamsError.at(provider) if provider in self.streams else None

    # Use of modules by blocks, see ``ModuleUse``.

    def applied(
        self,
        path: str,
        apply: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        method: str = "",
    ) -> Any:
        """Apply the module at ``path``, or a method of it, to copies of the block's arguments.

        vLLM's norms and rotary embeddings write into their arguments. Without copies, tensors that come from
        the model would count as edited by the block and be written back. ValueError if the module keeps what
        it computes for the model's own call.
        """
        if path in self.held:
            raise ValueError(
                f"`{path}` cannot be called by a block: it keeps its result for the running step. Call the "
                "shared experts themselves, or the layer of experts."
            )
        args, kwargs = map_tensors((args, kwargs), torch.clone)
        return super().applied(path, apply, args, kwargs, method)

    def call_module(self, envoy: Envoy, *args: torch.Tensor) -> Any:
        return envoy._apply_to_values(*args)  # noqa: SLF001 - an envoy of ours

    def called_directly(self, path: str) -> None:
        """Raise ValueError if a block makes this call of a module, which probes would observe."""
        if self.current is not None:
            raise ValueError(
                f"`{path}` cannot be called with hook=True inside vLLM: other requests wait for the model's "
                "own calls of it. Call it without."
            )

    # Values that the model provides.

    def begin_step(self) -> None:
        """Forget the last step: its places are those that were reached ``ever``."""
        self.ever.update(self.calls)
        self.calls.clear()
        self.interleaving = True
        self.by_taps = self._is_catching_up = self.is_uncompiled = False
        self._served_until = None
        self._tap = -1
        self._reach = 0
        self.next_tap = 0

    def listen(self) -> None:
        """Observe this thread's module calls: the model runs."""
        self.listener = threading.get_ident()

    def pause(self) -> None:
        """Stop observing module calls: the model has run."""
        self.listener = 0

    def end_step(self) -> None:
        self.interleaving = False
        self.undone = ()

    # Phases in which blocks may run.

    def jointly(self, act: Callable[[], Any]) -> Any:
        """Return what ``act`` returns; other workers take part in what blocks ask of the model meanwhile.

        A worker that runs no blocks does not act: it returns whether the acting one's answer is True.
        """
        return act()

    def start_step(self, spans: Sequence[TraceSpan], num_rows: int, act: Callable[[], bool]) -> bool:  # noqa: ARG002 - for stages
        """Return whether a block takes part in a step; ``act`` begins it where blocks run."""
        takes_part: bool = self.jointly(act)
        return takes_part

    def offer(self, provider: str, number: int | None, value: Any) -> Any:  # noqa: ARG002 - each request counts for itself
        """Give the waiting requests their rows of a value; return the value as they leave it."""
        self.place.enter(provider, value)
        for request in self._wanting(provider):
            request.arrive(provider)
        if not self._is_repeated(provider):
            self._serve(provider)
        return self.place.leave()

    def _serve(self, provider: str) -> None:
        """Serve the value until no request is due: one that was served may ask again, or release another."""
        served: dict[Participant, None] = {}
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
        for request in served:  # not earlier: one may have released another from a barrier
            if self.route is not None and provider not in self.route.served:
                request.needs_modules = True
            request.leave(provider)
        for request in self._wanting(provider):
            request.watch_pass(provider)

    def _is_repeated(self, provider: str) -> bool:
        """Return whether blocks had the value of this place before the step was rerun."""
        is_last = provider == self._served_until
        is_repeated = self._is_catching_up or is_last
        self._is_catching_up = self._is_catching_up and not is_last
        return is_repeated

    def provide(self, provider: str, value: Any) -> Any:
        """Offer a value if a block wants it, and count its place as passed; return it as blocks leave it."""
        if provider in self.wanted:
            value = self.offer(provider, None, value)
        self.calls[provider] = 1
        return value

    # Steps that are served at the taps.

    def choose(self, requests: Iterable[Participant]) -> None:
        """Choose the tier of this step: the taps, if they are expected to provide all wanted values."""
        likely = not any(request.needed_modules for request in requests)
        self.by_taps = self.route is not None and likely and not self._users_of_modules()
        if self.by_taps:
            self._look_ahead()

    def _look_ahead(self) -> None:
        """Set ``next_tap`` to the next where a request waits, or the last, to record that it was reached."""
        assert self.route is not None  # noqa: S101 - without one there is no such step
        waiting = [self.route.tap_at.get(provider, -1) for provider in self.wanted]
        self.next_tap = min((tap for tap in waiting if tap > self._tap), default=self.route.last)

    def _users_of_modules(self) -> list[Participant]:
        """Return the requests that use, in this step, a value that no tap provides."""
        return [
            request
            for provider in self._untapped
            for request in self.wanted.get(provider, ())
            if request.uses(provider)
        ]

    def at_tap(self, tap: int, value: Any) -> None:
        """Serve blocks at a tap, which may change the value in place; UntappedError if they need more."""
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
            request.needs_modules = True
        if users:
            raise UntappedError
        self._look_ahead()

    def _at_tap_among_modules(self, provider: str, value: Any) -> None:
        """Handle a tap while module calls are observed; these provide all places except the first tap's."""
        if provider == self.entry:
            self._offer_in_place(provider, value)
            self.calls[provider] = 1
        self._is_catching_up = self._is_catching_up and provider != self._served_until
        self.next_tap = self._tap if self._is_catching_up else _NEVER

    def _offer_in_place(self, provider: str, value: Any) -> None:
        """Offer a tap's value; copy changes into its tensors, with which the compiled model continues."""
        if provider not in self.wanted:
            return
        changed = self.offer(provider, None, value)
        if changed is not value:
            for old, new in zip(tensors(value), tensors(changed), strict=True):
                if new is not old:
                    old.copy_(new)

    def at_end(self) -> None:
        """Raise UntappedError if the model, run with taps, has not reached the last tap."""
        assert self.route is not None  # noqa: S101 - as above
        if self._tap != self.route.last:
            logger.error("the compiled model has lost its taps; please report this with the model's name")
            raise UntappedError
        self._reach = len(self.route.order)

    def again(self) -> None:
        """Rerun the step with module calls observed; blocks continue from the tap that was reached."""
        assert self.route is not None  # noqa: S101 - as above
        self.go_by_modules()
        self._served_until = self.route.exits.get(self._tap)
        self._is_catching_up = self._served_until is not None

    def go_by_modules(self) -> None:
        self.by_taps = False
        self.next_tap = 0

    def _wanting(self, provider: str) -> list[Participant]:
        return sorted(self.wanted.get(provider, ()), key=_by_order)

    def fail(self, provider: str, error: BaseException) -> None:
        """Raise an error in the blocks that have a use for a value that cannot be provided."""
        for request in self._wanting(provider):
            if request.uses(provider):
                request.refuse(provider, error)
        if self.gather is not None:
            self.gather()

    def handle(self, provider: str | None = None, value: Any = None, iterate: bool = False) -> Any:  # noqa: ARG002, FBT001, FBT002 - the documented signature
        """Provide a value, as the custom code of an envoy may."""
        return value if provider is None else self.provide(provider, value)


class Participant(Protocol):
    """A ``TracedRequest``, or the ``SandboxSession`` of a sandbox process, as the dispatcher sees it."""

    needed_modules: bool
    needs_modules: bool

    @property
    def order(self) -> int: ...

    @property
    def in_step(self) -> bool: ...

    @property
    def partial(self) -> bool:
        """Whether the step computes a chunk of the prompt that does not reach its end."""

    def uses(self, provider: str) -> bool:
        """Return whether it has any use for the value that the model has reached."""

    def arrive(self, provider: str) -> None:
        """Apply changes of an earlier run of these rows, before the value is offered to any block."""

    def is_due(self, provider: str) -> bool:
        """Return whether the value is to be offered to it now."""

    def serve(self, provider: str) -> None:
        """Offer it the value; its changes replace the value of the dispatcher's place."""

    def leave(self, provider: str) -> None:
        """Close the value: later changes no longer reach the model."""

    def watch_pass(self, provider: str) -> None:
        """Record the value as all blocks have left it."""

    def refuse(self, provider: str, error: BaseException) -> None:
        """Raise an error in the blocks that have a use for a value that cannot be provided."""
