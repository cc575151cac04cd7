"""A sandbox's real process and a model that is played over two ranks, each a thread.

What the block sees, does and saves is what it is with one worker, and no rank waits for a message that does
not come, whether a step waits for the process or goes on without it.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, cast

import pytest
import torch

from nnsight_engine.sandbox.forkserver import ForkServer
from nnsight_engine.vllm_backend.traces.block_adapters import BlockAdapters
from nnsight_engine.vllm_backend.traces.names import Names
from nnsight_engine.vllm_backend.traces.peer_traces import PeerTraces
from nnsight_engine.vllm_backend.traces.ranks import Ranks
from nnsight_engine.vllm_backend.traces.request import TraceSpan
from nnsight_engine.vllm_backend.traces.shards import EVERYWHERE, Layout, ShardLocation, ShardPiece
from nnsight_engine.vllm_backend.traces.step_facts import StepFacts
from nnsight_engine.vllm_backend.traces.tp_collectives import TpCollectives
from nnsight_engine.vllm_backend.traces.tp_follower import TpFollowerDispatcher, TpFollowerTraces
from nnsight_engine.vllm_backend.traces.tp_leader import TpLeaderTraces
from nnsight_engine.vllm_backend.traces.worker_traces import WorkerTraces
from tests.fakes.ranks import two_ranks
from tests.security.played import (
    HEAD,
    LIMITS,
    NEIGHBOUR,
    POINTS,
    PROMPT,
    STEPS,
    WIDTH,
    Played,
    PlayedModel,
    Served,
    Worker,
    block_of,
    code_lasting,
    entry_of,
    layer_of_one,
    play,
)

_WAIT_S: Final = 120
_MANY: Final = 1100
"""More traces than a worker stores for collection."""
_SPREAD: Final = "model.model.layers.1.output"


class PlayedShards:
    """One place whose tensors are spread by columns, and one module that all ranks call."""

    def place(self, provider: str) -> ShardLocation:
        return ShardLocation(rest=Layout((ShardPiece(WIDTH // 2),))) if provider == _SPREAD else EVERYWHERE

    def is_understood(self, provider: str) -> bool:
        return True

    def needs_all(self, path: str) -> bool:
        return path == HEAD

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
    def __init__(self, ranks: Ranks, server: ForkServer, **limits: Any) -> None:
        own = dataclasses.replace(LIMITS, **limits)
        super().__init__(POINTS, cast("Any", None), ranks, own)
        self.dispatcher.spread = PlayedCollectives(ranks, cast("PlayedModel", self.model))
        self.sandboxes.open(server, cast("Any", Served(self)), own.sandbox_message_bytes)

    def _new_model(self, names: Names) -> Any:
        return PlayedModel()


class Follower(TpFollowerTraces):
    def __init__(self, ranks: Ranks) -> None:
        model = PlayedModel()
        PeerTraces.__init__(self, TpFollowerDispatcher(), cast("Any", model))
        self.dispatcher.spread = PlayedCollectives(ranks, model)


def layer_of_rank(
    ranks: Ranks, traces: WorkerTraces | PeerTraces, layer: int, hidden: torch.Tensor
) -> torch.Tensor:
    """Return the hidden states behind a layer, of one of which each rank has some columns."""
    provider = f"model.model.layers.{layer}.output"
    if provider != _SPREAD:
        return layer_of_one(traces, layer, hidden)
    value = (hidden + 1, torch.zeros_like(hidden))
    parts = traces.dispatcher.provide(
        provider, tuple(tensor.chunk(2, -1)[ranks.rank].contiguous() for tensor in value)
    )
    first, second = (torch.cat(list(ranks.gather(part)), dim=-1) for part in parts)
    return first + second


def over_ranks(server: ForkServer, code: str, wait_s: float) -> tuple[list[Played], list[int]]:
    first, second, orders = two_ranks()
    leader, follower = Leader(first, server, sandbox_wait_s=wait_s), Follower(second)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(play, follower, code, layer_of=partial(layer_of_rank, second, follower))
        played = [play(leader, code, layer_of=partial(layer_of_rank, first, leader)), other.result(_WAIT_S)]
    assert orders.empty(), "an order that nobody executes"
    return played, [cast("Any", one.dispatcher.spread).num_calls for one in (leader, follower)]


@pytest.mark.parametrize(("seconds", "wait_s"), [(0.0, 5.0), (0.06, 0.005)], ids=["waited for", "deferred"])
def test_a_block_over_two_ranks_does_what_it_does_over_one(
    server: ForkServer, seconds: float, wait_s: float
) -> None:
    alone = play(Worker(server), code_lasting(0))
    (leading, following), num_calls = over_ranks(server, code_lasting(seconds), wait_s)
    assert len(alone.saves["seen"]) == STEPS
    assert leading.saves == alone.saves
    assert following.block is None
    assert leading.states == following.states == alone.states
    assert leading.neighbours == following.neighbours == alone.neighbours
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
    leader = Leader(first, server, max_sandboxes=0)
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
    traces = Worker(server)
    facts = StepFacts([("own", entry_of(REFUSED).to_plain())], (), {"own"})
    traces.begin(facts)
    traces.step([TraceSpan("own", 0, 0, PROMPT, 0, complete=True)], PROMPT + NEIGHBOUR)
    traces.dispatcher.listen()
    layer_of_one(traces, 0, torch.zeros(PROMPT + NEIGHBOUR, WIDTH))
    traces.dispatcher.fail(_SPREAD, RuntimeError("the ranks' parts do not fit"))
    traces.dispatcher.pause()
    assert traces.end() == ["own"]
    block = block_of(traces)
    assert block is not None
    assert block["error"]["message"] == "the ranks' parts do not fit"
