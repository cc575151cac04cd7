"""A sandbox's real process and a model that is played over two ranks or two stages, each a thread.

What the block sees, does and saves is what it is with one worker, and no worker waits for a message that does
not come, whether a step waits for the process or goes on without it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import queue
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any, Final, cast

import pytest
import torch

from nnsight_engine.sandbox.forkserver import ForkServer
from nnsight_engine.serialization import decode, encode
from nnsight_engine.serialization.message.table import Piece
from nnsight_engine.vllm_backend.traces.block_adapters import BlockAdapters
from nnsight_engine.vllm_backend.traces.entry import TraceEntry
from nnsight_engine.vllm_backend.traces.names import Names
from nnsight_engine.vllm_backend.traces.peer_traces import PeerTraces
from nnsight_engine.vllm_backend.traces.ranks import Ranks
from nnsight_engine.vllm_backend.traces.remote_modules import described, tree
from nnsight_engine.vllm_backend.traces.request import TraceSpan
from nnsight_engine.vllm_backend.traces.sandboxed.module_call import ModuleCall
from nnsight_engine.vllm_backend.traces.shards import EVERYWHERE, Layout, ShardLocation, ShardPiece
from nnsight_engine.vllm_backend.traces.stages.early_stage import EarlyStageDispatcher, EarlyStageTraces
from nnsight_engine.vllm_backend.traces.stages.last_stage import LastStageTraces
from nnsight_engine.vllm_backend.traces.step_facts import StepFacts
from nnsight_engine.vllm_backend.traces.tp_collectives import TpCollectives
from nnsight_engine.vllm_backend.traces.tp_follower import TpFollowerDispatcher, TpFollowerTraces
from nnsight_engine.vllm_backend.traces.tp_leader import TpLeaderTraces
from nnsight_engine.vllm_backend.traces.worker_traces import WorkerTraces
from tests.fakes.ranks import two_ranks
from tests.security.played import (
    LAYERS,
    LIMITS,
    NEIGHBOUR,
    PROMPT,
    STEPS,
    VOCABULARY,
    WIDTH,
    Outline,
    Places,
    code_lasting,
    entry_of,
)

_WAIT_S: Final = 120
_MANY: Final = 1100
"""More traces than a worker stores for collection."""
_SPREAD: Final = "model.model.layers.1.output"
_HEAD: Final = "model.lm_head"
_POINTS: Final[Any] = SimpleNamespace(
    tensor_parallel_size=2, local_layers=(), layers=(), model=torch.nn.Linear(1, 1)
)


def double(rows: torch.Tensor) -> torch.Tensor:
    return 2 * rows


class PlayedModel:
    """The tree of envoys, of which blocks in a process need a path, and callers of modules one module."""

    path = "model"
    device = torch.device("cpu")
    _sources = ()

    def __init__(self) -> None:
        self.head: Any = SimpleNamespace(path=_HEAD, _module=None, _apply_to_values=double)

    def token_places(self) -> dict[str, int]:
        return {"model.samples.output": VOCABULARY}

    def own_modules(self) -> list[Any]:
        return []

    def modules(self) -> list[Any]:
        return []

    def get(self, path: str) -> Any:
        assert path == _HEAD
        return self.head

    @contextlib.contextmanager
    def observed_by(self, dispatcher: Any) -> Iterator[None]:
        dispatcher.listen()
        yield
        dispatcher.pause()


class Served(Places):
    """Calls the one module that there is where it is, few rows at once."""

    def __init__(self, traces: WorkerTraces, envoy: Any) -> None:
        super().__init__()
        self.apply = partial(traces.dispatcher.call_module, envoy)

    def begin(self, path: str, args: Any, kwargs: Any) -> ModuleCall:
        assert (path, kwargs) == (_HEAD, {})
        return ModuleCall(path, self.apply, args, args[0].ndim - 1, 1)


# Ranks.


class PlayedShards:
    """One place whose tensors are spread by columns, and one module that all ranks call."""

    def place(self, provider: str) -> ShardLocation:
        return ShardLocation(rest=Layout((ShardPiece(WIDTH // 2),))) if provider == _SPREAD else EVERYWHERE

    def is_understood(self, provider: str) -> bool:
        return True

    def needs_all(self, path: str) -> bool:
        return path == _HEAD

    def has_parts(self, path: str) -> bool:
        return False


class PlayedCollectives(TpCollectives):
    def __init__(self, ranks: Ranks, model: PlayedModel) -> None:
        self.ranks = ranks
        self.shards = cast("Any", PlayedShards())
        self.adapters = BlockAdapters()
        self._model = cast("Any", model)
        self.num_calls = 0

    def call(
        self, path: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], adapter: int | None
    ) -> Any:
        self.num_calls += 1
        return super().call(path, method, args, kwargs, adapter)


class Leader(TpLeaderTraces):
    def __init__(self, ranks: Ranks, limits: Any, server: ForkServer) -> None:
        super().__init__(_POINTS, cast("Any", None), ranks, limits)
        model = cast("PlayedModel", self.model)
        self.dispatcher.spread = PlayedCollectives(ranks, model)
        self.sandboxes.open(server, cast("Any", Served(self, model.head)), limits.sandbox_message_bytes)

    def _new_model(self, names: Names) -> Any:
        return PlayedModel()


class Follower(TpFollowerTraces):
    def __init__(self, ranks: Ranks) -> None:
        model = PlayedModel()
        PeerTraces.__init__(self, TpFollowerDispatcher(), cast("Any", model))
        self.dispatcher.spread = PlayedCollectives(ranks, model)


@dataclasses.dataclass
class Played:
    """What one worker saw of a request.

    Attributes:
        saves: What its block saved, where it ran.
        states: What the model ended each step with.
        undone: The steps that went on without it.
    """

    saves: Any
    states: list[Any]
    undone: list[list[str]]


def spans_of(done: int, num_rows: int) -> list[TraceSpan]:
    return [TraceSpan("own", 0, 0, num_rows, done, complete=True)]


def _layers(
    traces: WorkerTraces | PeerTraces, hidden: torch.Tensor, numbers: Sequence[int], ranks: Ranks | None
) -> torch.Tensor:
    for layer in numbers:
        hidden = hidden + 1
        provider = f"model.model.layers.{layer}.output"
        value: Any = (hidden, torch.zeros_like(hidden))
        if ranks is None or provider != _SPREAD:
            value = traces.dispatcher.provide(provider, value)
        else:
            parts = [tensor.chunk(2, -1)[ranks.rank].contiguous() for tensor in value]
            parts = traces.dispatcher.provide(provider, tuple(parts))
            value = [torch.cat(list(ranks.gather(part)), dim=-1) for part in parts]
        hidden = value[0] + value[1]
    return hidden


def _behind(traces: WorkerTraces | PeerTraces, hidden: torch.Tensor) -> list[Any]:
    logits = torch.zeros(1, VOCABULARY)
    logits[0] = hidden[-NEIGHBOUR - 1, 0]
    logits = traces.on_logits(logits) if traces.in_step else logits
    samples = torch.tensor([[3]])
    samples = traces.on_samples(samples) if traces.in_step else samples
    return [hidden.tolist(), logits.tolist(), samples.tolist()]


def _hidden(done: int, num_rows: int) -> torch.Tensor:
    rows = torch.arange(done, done + num_rows).float()[:, None].expand(-1, WIDTH)
    return torch.cat([rows, torch.zeros(NEIGHBOUR, WIDTH)])


def play(
    traces: WorkerTraces | PeerTraces,
    entry: TraceEntry,
    forward: Callable[[int, int], list[Any]],
) -> Played:
    """Play the runner to one request, as each worker does, until it has all its tokens."""
    played, done, step = Played(None, [], []), 0, 0
    arrived: list[tuple[str, Any]] = [("own", entry.to_plain())]
    while step < STEPS:
        num_rows = PROMPT if not step else 1
        facts = StepFacts(arrived, (), {"own"})
        arrived = []
        traces.before(facts)
        traces.begin(facts)
        state = forward(done, num_rows)
        undone = list(traces.undone)
        assert traces.end() == []
        traces.dispatcher.interleaving = False
        if undone:
            played.undone.append(undone)
            assert len(played.undone) < 300
            traces.begin(StepFacts())
            traces.wait_for_any(0.05)
            traces.end()
            continue
        played.states.append(state)
        done, step = done + num_rows, step + 1
    traces.begin(StepFacts(finished={"own"}))
    block = block_of(traces)
    if block is not None:
        assert block["error"] is None, block["error"]["message"]
        played.saves = block["saves"]
    return played


def block_of(traces: WorkerTraces | PeerTraces) -> Any:
    """Return the outcome of the block; None on a worker that does not run it."""
    while not traces.has_collected("key", {"0/0": {}}, 0.05):
        pass
    pieces = traces.collect("key", {"0/0": {}})
    return decode(b"".join(pieces))["blocks"][0] if pieces else None


def _whole(traces: WorkerTraces | PeerTraces, ranks: Ranks | None) -> Any:
    def forward(done: int, num_rows: int) -> list[Any]:
        traces.step(spans_of(done, num_rows), num_rows + NEIGHBOUR)
        traces.dispatcher.listen()
        hidden = _layers(traces, _hidden(done, num_rows), range(LAYERS), ranks)
        traces.dispatcher.pause()
        return _behind(traces, hidden)

    return forward


class One(WorkerTraces):
    """The only worker."""

    def __init__(self, server: ForkServer, wait_s: float) -> None:
        limits = dataclasses.replace(LIMITS, sandbox_wait_s=wait_s)
        super().__init__(_POINTS, cast("Any", None), limits)
        head = cast("Any", self.model).head
        self.sandboxes.open(server, cast("Any", Served(self, head)), limits.sandbox_message_bytes)

    def _new_model(self, names: Names) -> Any:
        return PlayedModel()


def over_one(server: ForkServer, code: str, wait_s: float) -> Played:
    traces = One(server, wait_s)
    return play(traces, entry_of(code), _whole(traces, None))


def over_ranks(server: ForkServer, code: str, wait_s: float) -> tuple[list[Played], list[int]]:
    first, second, orders = two_ranks()
    leader = Leader(first, dataclasses.replace(LIMITS, sandbox_wait_s=wait_s), server)
    follower = Follower(second)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(play, follower, entry_of(code), _whole(follower, second))
        played = [play(leader, entry_of(code), _whole(leader, first)), other.result(_WAIT_S)]
    assert orders.empty(), "an order that nobody executes"
    return played, [cast("Any", one.dispatcher.spread).num_calls for one in (leader, follower)]


@pytest.mark.parametrize(("seconds", "wait_s"), [(0.0, 5.0), (0.06, 0.005)], ids=["waited for", "deferred"])
def test_a_block_over_two_ranks_does_what_it_does_over_one(
    server: ForkServer, seconds: float, wait_s: float
) -> None:
    alone = over_one(server, code_lasting(0), 5.0)
    (leading, following), num_calls = over_ranks(server, code_lasting(seconds), wait_s)
    assert len(alone.saves["seen"]) == STEPS
    assert leading.saves == alone.saves
    assert following.saves is None
    assert leading.states == following.states == alone.states
    assert leading.undone == following.undone
    assert leading.undone or seconds == 0, "every step was waited for, so nothing was shown"
    assert num_calls[0] == num_calls[1] > 0


class _Key(str):
    """A trace's key, of which a test sees whether anything still refers to it."""

    __slots__ = ("__weakref__",)


def test_traces_that_are_never_collected_leave_no_key_on_any_rank(
    server: ForkServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "nnsight_engine")  # a stored record of an error refers to its frames
    first, second, _ = two_ranks()
    leader = Leader(first, dataclasses.replace(LIMITS, max_sandboxes=0), server)
    follower = Follower(second)
    plain = entry_of("model.samples.output").to_plain()
    keys = []
    for number in range(_MANY):
        key = _Key(number)
        keys.append(weakref.ref(key))
        facts = StepFacts([(str(number), {**plain, "key": key})], {str(number - 1)})
        for traces in (leader, follower):  # the leading rank does not wait for the other
            traces.begin(facts)
        assert leader.end() == [str(number)]
        assert follower.end() == []
        del key, facts
    gc.collect()  # errors refer to the frames that raised them
    num_left = leader.num_live()["traces"]
    assert 0 < num_left < _MANY
    num_alive = sum(key() is not None for key in keys)
    assert num_alive <= num_left + 1, "an error that is being handled may refer to its step's frames"


REFUSED: Final = """
first = model.layers[0].output.sum().item()
model.layers[1].output
"""


def test_a_place_that_cannot_be_provided_fails_a_block_that_has_read_another(server: ForkServer) -> None:
    traces = One(server, 5.0)
    facts = StepFacts([("own", entry_of(REFUSED).to_plain())], (), {"own"})
    traces.begin(facts)
    traces.step(spans_of(0, PROMPT), PROMPT + NEIGHBOUR)
    traces.dispatcher.listen()
    _layers(traces, _hidden(0, PROMPT), [0], None)
    traces.dispatcher.fail(_SPREAD, RuntimeError("the ranks' parts do not fit"))
    traces.dispatcher.pause()
    assert traces.end() == ["own"]
    assert block_of(traces)["error"]["message"] == "the ranks' parts do not fit"


# Stages.


class QueuedLink:
    """One side of a link between two threads."""

    def __init__(self, there: queue.Queue[bytes], here: queue.Queue[bytes]) -> None:
        self._there, self._here = there, here

    def send(self, message: Sequence[Piece]) -> None:
        self._there.put(b"".join(message))

    def receive(self) -> memoryview:
        return memoryview(bytearray(self._here.get(timeout=_WAIT_S)))


class LastStage(LastStageTraces):
    def __init__(self, link: QueuedLink, limits: Any, server: ForkServer) -> None:
        super().__init__(_POINTS, cast("Any", None), [link], limits)
        elsewhere = tree(described(Outline()), 0, self, {}).get_submodule("lm_head")
        head = SimpleNamespace(path=_HEAD, _module=elsewhere)
        self.sandboxes.open(server, cast("Any", Served(self, head)), limits.sandbox_message_bytes)

    def _new_model(self, names: Names) -> Any:
        return PlayedModel()


class EarlyStage(EarlyStageTraces):
    def __init__(self, link: QueuedLink) -> None:
        model = PlayedModel()
        model.head = double
        dispatcher = EarlyStageDispatcher(link, [])
        PeerTraces.__init__(self, dispatcher, cast("Any", model))
        self.dispatcher.model = cast("Any", model)
        link.send([encode(described(Outline()))])


def over_stages(server: ForkServer, code: str, wait_s: float) -> list[Played]:
    up: queue.Queue[bytes] = queue.Queue()
    down: queue.Queue[bytes] = queue.Queue()
    passed: queue.Queue[torch.Tensor] = queue.Queue()
    early = EarlyStage(QueuedLink(up, down))
    limits = dataclasses.replace(LIMITS, sandbox_wait_s=wait_s, sandbox_step_s=60.0)  # on a busy machine
    last = LastStage(QueuedLink(down, up), limits, server)

    def first_half(done: int, num_rows: int) -> list[Any]:
        is_traced = early.step(spans_of(done, num_rows), num_rows + NEIGHBOUR)
        with early.running() if is_traced else contextlib.nullcontext():
            hidden = _layers(early, _hidden(done, num_rows), range(LAYERS // 2), None)
        passed.put(hidden)
        return []

    def second_half(done: int, num_rows: int) -> list[Any]:
        hidden = passed.get(timeout=_WAIT_S)
        last.step(spans_of(done, num_rows), num_rows + NEIGHBOUR)
        last.dispatcher.listen()
        hidden = _layers(last, hidden, range(LAYERS // 2, LAYERS), None)
        last.dispatcher.pause()
        return _behind(last, hidden)

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(play, early, entry_of(code), first_half)
        played = [play(last, entry_of(code), second_half), other.result(_WAIT_S)]
    assert up.empty()
    assert down.empty()
    return played


@pytest.mark.parametrize(("seconds", "wait_s"), [(0.0, 5.0), (0.06, 0.005)], ids=["quick", "slow"])
def test_a_block_over_two_stages_does_what_it_does_over_one(
    server: ForkServer, seconds: float, wait_s: float
) -> None:
    alone = over_one(server, code_lasting(0), 5.0)
    last, _ = over_stages(server, code_lasting(seconds), wait_s)
    assert last.saves == alone.saves
    assert last.states == alone.states
    assert last.undone == [], "over stages a step waits for its blocks"
