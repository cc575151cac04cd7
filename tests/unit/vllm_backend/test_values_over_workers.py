"""Values over ranks and stages: one worker runs the blocks, and the others offer it their values."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final, cast

import pytest
import torch

from nnsight_engine.core.trees import map_tensors
from nnsight_engine.vllm_backend.traces.errors import SpreadModuleError, StageError
from nnsight_engine.vllm_backend.traces.remote_modules import RemoteModule
from nnsight_engine.vllm_backend.traces.request import TraceSpan
from nnsight_engine.vllm_backend.traces.row_payloads import RowPayloads
from nnsight_engine.vllm_backend.traces.shards import Layout, ShardLocation, ShardPiece, Shards
from nnsight_engine.vllm_backend.traces.stages import EarlyStageDispatcher, LastStageDispatcher, StageStep
from nnsight_engine.vllm_backend.traces.tensor_parallel import FollowingDispatcher, LeadingDispatcher
from nnsight_engine.vllm_backend.traces.trace_dispatcher import TraceDispatcher
from tests.fakes.ranks import two_ranks

_WAIT_S: Final = 120
PLACE: Final = "model.wide.output"
OTHER: Final = "model.narrow.output"
PARTS: Final = [torch.tensor([[0.0, 1.0]]), torch.tensor([[2.0, 3.0]])]
POINTS: Final[Any] = SimpleNamespace(
    tensor_parallel_size=2,
    local_layers=(),
    model=torch.nn.Linear(1, 1),
    family=SimpleNamespace(layers="model.layers"),
)


class Participant:
    """A request whose block does ``act`` with each value that it is given."""

    order, in_step, partial = 0, True, False
    needed_modules = needs_modules = False

    def __init__(self, dispatcher: TraceDispatcher, act: Callable[[Any], Any]) -> None:
        self._dispatcher, self._act = dispatcher, act
        self._is_served = False
        self.refused: list[str] = []

    def uses(self, provider: str) -> bool:
        return provider in self._dispatcher.wanted

    def arrive(self, _provider: str) -> None:
        self._is_served = False

    def is_due(self, _provider: str) -> bool:
        return not self._is_served

    def serve(self, _provider: str) -> None:
        self._is_served = True
        place = self._dispatcher.place
        place.value = self._act(place.value)

    def leave(self, _provider: str) -> None: ...

    def watch_pass(self, _provider: str) -> None: ...

    def refuse(self, _provider: str, error: BaseException) -> None:
        self.refused.append(str(error))


def at_once(*acts: Callable[[], Any]) -> list[Any]:
    """Do each on a thread of its own, as workers do; return what they return."""
    answers: list[Any] = [None] * len(acts)

    def run(number: int) -> None:
        try:
            answers[number] = acts[number]()
        except Exception as error:  # noqa: BLE001 - looked at by the test
            answers[number] = error

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(acts))]
    for one in threads:
        one.start()
    for one in threads:
        one.join(_WAIT_S)
        assert not one.is_alive(), "a worker waits for a message that is never sent"
    return answers


def never() -> bool:
    raise AssertionError("blocks run on the leading rank")


@pytest.fixture
def ranks() -> tuple[LeadingDispatcher, FollowingDispatcher]:
    """Return two ranks, each with half of the columns of a module's output, which doubles what it takes."""
    leading, following, _ = two_ranks()
    pair = (LeadingDispatcher(leading, POINTS), FollowingDispatcher(following, POINTS))
    for rank, dispatcher in enumerate(pair):
        modules = [(torch.nn.Identity(), path) for path in ("model.wide", "model.narrow")]
        shards = dispatcher.shards = Shards(POINTS, modules)
        shards._places[PLACE] = ShardLocation((Layout((ShardPiece(2),)),))
        shards._spread.add("model.wide")

        def apply(rows: torch.Tensor, rank: int = rank) -> torch.Tensor:
            return 2 * rows[:, 2 * rank : 2 * rank + 2]

        envoy = SimpleNamespace(path="model.wide", _module=None, _apply_to_values=apply)
        dispatcher.model = cast("Any", SimpleNamespace(get={"model.wide": envoy}.__getitem__))
    return pair


def test_ranks_agree_on_an_answer_and_go_on_after_an_error(
    ranks: tuple[LeadingDispatcher, FollowingDispatcher],
) -> None:
    leading, following = ranks

    def fail() -> None:
        raise ValueError("a block")

    for act, answer, agreed in ((lambda: True, True, True), (lambda: False, False, False), (list, [], False)):
        assert at_once(lambda act=act: leading.jointly(act), lambda: following.jointly(never)) == [  # type: ignore[misc]
            answer,
            agreed,
        ]
    error, agreed = at_once(lambda: leading.jointly(fail), lambda: following.jointly(never))
    assert (str(error), agreed) == ("a block", False)


@pytest.mark.parametrize("place", [PLACE, OTHER])
@pytest.mark.parametrize("changes", [False, True])
def test_a_block_has_the_whole_and_each_rank_goes_on_with_its_part(
    ranks: tuple[LeadingDispatcher, FollowingDispatcher], place: str, changes: bool
) -> None:
    leading, following = ranks
    parts = PARTS if place == PLACE else PARTS[:1] * 2
    seen: list[Any] = []

    def act(value: Any) -> Any:
        seen.append(value)
        return map_tensors(value, lambda tensor: tensor + 10) if changes else value

    leading.want(place, cast("Any", Participant(leading, act)))
    given = [(part.clone(), 7) for part in parts]
    # Nothing was announced, so that no rank stops.
    assert at_once(*(lambda one=one: one.provide(place, given[0]) for one in ranks)) == [given[0]] * 2
    at_once(lambda: leading.jointly(list), lambda: following.jointly(never))
    found = at_once(lambda: leading.provide(place, given[0]), lambda: following.provide(place, given[1]))
    whole = torch.cat(PARTS, dim=-1) if place == PLACE else parts[0]
    assert torch.equal(seen[0][0], whole)
    for before, after, part in zip(given, found, parts, strict=True):
        assert after is before if not changes else torch.equal(after[0], part + 10)
    leading.end_step()
    following.end_step()
    assert not following.wanted


def test_a_module_is_called_on_all_ranks_while_they_take_part(
    ranks: tuple[LeadingDispatcher, FollowingDispatcher],
) -> None:
    leading, following = ranks
    envoy: Any = leading.model.get("model.wide")
    rows = torch.arange(4.0)[None]
    with pytest.raises(SpreadModuleError, match="while it runs"):
        leading.call_module(envoy, rows)
    found, _ = at_once(
        lambda: leading.jointly(lambda: leading.call_module(envoy, rows)), lambda: following.jointly(never)
    )
    assert torch.equal(found, 2 * rows)


class Link:
    """A stage's end of a channel in this process."""

    def __init__(self, sent: queue.Queue[bytes], received: queue.Queue[bytes]) -> None:
        self._sent, self._received = sent, received

    def send(self, message: Any) -> None:
        self._sent.put(b"".join(message))

    def receive(self) -> memoryview:
        return memoryview(bytearray(self._received.get(timeout=_WAIT_S)))


@pytest.fixture
def stages() -> tuple[EarlyStageDispatcher, LastStageDispatcher]:
    there, back = queue.Queue[bytes](), queue.Queue[bytes]()
    early = EarlyStageDispatcher(cast("Any", Link(there, back)), POINTS)
    there.get(timeout=_WAIT_S)  # the description of its modules
    last = LastStageDispatcher([cast("Any", Link(back, there))], POINTS)
    early.model = cast("Any", SimpleNamespace(device=None, get=lambda _: lambda rows: rows * 3))
    last.model = cast("Any", SimpleNamespace(_sources=()))
    return early, last


SPANS: Final = [TraceSpan("own", 0, 1, 2, 0, complete=True), TraceSpan("ended", 1, 3, 1, 0, complete=True)]
NUM_ROWS: Final = 5


def served(last: LastStageDispatcher, *, live: bool = True) -> None:
    """Serve the early stage's part of a step, as the last stage does before its own part."""
    head, _ = last.receive(0)
    assert isinstance(head, StageStep)
    spans = [span for span in head.spans if live and span.request_id == "own"]
    last.answer(0, live=[span.request_id for span in spans])
    if spans:
        last.serve(0, RowPayloads(spans, head.num_rows))


def test_a_block_on_the_last_stage_changes_its_own_rows_of_an_earlier_one(
    stages: tuple[EarlyStageDispatcher, LastStageDispatcher],
) -> None:
    early, last = stages
    envoy: Any = SimpleNamespace(path="model.early", _module=object.__new__(RemoteModule))
    envoy._module.__dict__["stage"] = 0
    called: list[Any] = []

    def act(value: Any) -> Any:
        called.append(last.call_module(envoy, torch.ones(1)))
        return (value[0] + 10, *value[1:])

    participant = Participant(last, act)
    last.want(PLACE, cast("Any", participant))
    hidden, thing = torch.arange(2.0 * NUM_ROWS).view(NUM_ROWS, 2), object()

    def run() -> tuple[Any, Any]:
        assert early.start_step(SPANS, NUM_ROWS, never)
        early.listen()
        passed = early.provide(OTHER, (hidden, thing))
        changed = early.provide(PLACE, (hidden.clone(), thing))
        early.pause()
        return passed, changed

    (passed, changed), _ = at_once(run, lambda: served(last))
    assert passed[0] is hidden
    expected = hidden.clone()
    expected[1:3] += 10
    assert torch.equal(changed[0], expected)
    assert changed[1] is thing
    assert called[0].tolist() == [3.0]
    assert list(last.calls) == [OTHER, PLACE]
    assert (participant.refused, early.listener, dict(early.wanted)) == ([], 0, {})
    with pytest.raises(StageError, match="only answers while it computes"):
        last.call_module(envoy, torch.ones(1))


def test_a_stage_runs_alone_if_no_block_takes_part(
    stages: tuple[EarlyStageDispatcher, LastStageDispatcher],
) -> None:
    early, last = stages
    assert at_once(lambda: early.start_step(SPANS, NUM_ROWS, never), lambda: served(last, live=False)) == [
        False,
        None,
    ]
    early.jointly(never)
