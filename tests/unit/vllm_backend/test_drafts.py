"""Requests with drafts have the results that they have without, whichever drafts are accepted."""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from nnsight_engine.plans.drafts import takes_drafts
from nnsight_engine.plans.records import Payload, StepResults
from nnsight_engine.plans.request_plan import CompiledRequest
from tests.unit.vllm_backend.decoding import TOKEN_IDS, PlayedStep, Rows, Worker, compiled, hidden_of
from tests.unit.vllm_backend.test_runs import OPERATIONS as EVERYWHERE
from tests.unit.vllm_backend.test_runs import Told, told

PROMPT_LEN = 6
CHUNK = 4
MOST_DRAFTS = 3
OPERATIONS: list[dict[str, Any]] = [
    *(one for one in EVERYWHERE if "range" not in one.get("where", {})),
    {"op": "capture", "at": "layers.0.output", "where": {"tokens": [1, 3]}},
    {
        "op": "capture",
        "at": ["layers.1.output", "logits"],
        "where": {"exclude": {"tokens": [2]}},
        "reduce": "last",
    },
    {
        "op": "capture",
        "at": "layers.1.output",
        "where": {"tokens": [4], "phase": "generated"},
        "reduce": "mean",
    },
    {"op": "ablate", "at": "layers.0.output", "units": [2], "where": {"tokens": [5]}},
    {"op": "capture", "at": "layers.0.output", "where": {"phase": "prompt"}},
    {"op": "capture", "at": "samples", "where": {"phase": "prompt"}},
]


@dataclasses.dataclass
class Life:
    """A request on its way.

    Attributes:
        seed: Decides what the stand-in computes for it.
        request: What it asks for.
        end: Number of tokens, those of the prompt included, that it has when it stops.
        position: Where its next rows begin.
        num_known: Number of its tokens, as the device knows them.
        num_delivered: The same, as the host knows it.
        in_flight: By step under way, how many of its drafts are refused.
        pauses: Whether it is preempted, and waits for its steps under way.
    """

    seed: int
    request: CompiledRequest
    end: int
    position: int = 0
    num_known: int = PROMPT_LEN
    num_delivered: int = PROMPT_LEN
    in_flight: deque[int] = dataclasses.field(default_factory=deque)
    pauses: bool = False


@dataclasses.dataclass
class StepUnderWay:
    """A step whose results the host does not know yet."""

    batch: list[Rows]
    sampled: list[list[int]]
    deliver: Callable[[], StepResults | None]


class Engine:
    """Runs requests to their ends.

    Args:
        seed: Decides which drafts there are, which are accepted, and who is preempted.
        requests: By id.
        has_drafts: Whether there are any drafts.
        num_late: How many steps later the host knows the results of a step.
        max_request_bytes: Limit on the captures of a request.
        preempts: Whether requests are preempted.
    """

    def __init__(
        self,
        seed: int,
        requests: dict[str, CompiledRequest],
        *,
        has_drafts: bool,
        num_late: int,
        max_request_bytes: int = 1 << 20,
        preempts: bool = True,
    ) -> None:
        self._rng, lengths = random.Random(seed), random.Random(seed)
        self._has_drafts, self._num_late, self._preempts = has_drafts, num_late, preempts
        self.worker = Worker(
            shares=True,
            is_asynchronous=num_late > 0,
            max_request_bytes=max_request_bytes,
        )
        self.worker.num_known = PROMPT_LEN
        self._lives = {
            name: Life(index, request, PROMPT_LEN + lengths.randint(1, 20))
            for index, (name, request) in enumerate(requests.items())
        }
        self._under_way: deque[StepUnderWay] = deque()
        self.found: dict[str, Payload] = {}
        self.num_preempted = 0
        self.most_bytes = 0
        self._returned: dict[str, int] = {}

    def run(self) -> dict[str, Payload]:
        """Return the requests' results."""
        for name, life in self._lives.items():
            self.worker.outbox.open(name, life.request.plan, stops_outside=False)
        arrived, finished = {name: life.request for name, life in self._lives.items()}, set[str]()
        while self._lives:
            num_before = len(self._under_way)
            candidates = [self._rows(name, life) for name, life in self._lives.items()]
            self.worker.begin(arrived, finished, self._returned)
            arrived, self._returned = {}, {}
            self._step([rows for rows in candidates if rows is not None])
            is_due = len(self._under_way) > self._num_late or len(self._under_way) == num_before
            finished = self._deliver() if is_due else set()
        self.worker.begin({}, finished)
        assert self.worker.state.num_live() == {
            "requests": 0,
            "vectors": 0,
            "dictionaries": 0,
            "captured_bytes": 0,
        }
        return self.found

    def _rows(self, name: str, life: Life) -> Rows | None:
        rng = self._rng
        if self._preempts and not life.pauses and life.position > PROMPT_LEN and rng.random() < 0.08:
            life.pauses = True
            self.num_preempted += 1
        if life.pauses:
            if life.in_flight:
                return None
            life.pauses, life.position = False, 0
            self._returned[name] = life.num_known
        missing = life.num_known - life.position
        if missing > 1:
            return Rows(name, life.seed, life.position, min(missing, CHUNK))
        takes = self._has_drafts and takes_drafts(life.request.plan)
        num_drafts = rng.randint(0, MOST_DRAFTS) if takes and rng.random() < 0.7 else 0
        return Rows(name, life.seed, life.position, 1 + num_drafts, num_drafts, sum(life.in_flight))

    def _step(self, batch: list[Rows]) -> None:
        self._rng.shuffle(batch)
        if not batch:
            return
        plan = self.worker.plan(batch)
        self.most_bytes = max(self.most_bytes, self.worker.state.num_live()["captured_bytes"])
        ends = torch.from_numpy(PlayedStep(batch, shares=True).logits_rows())
        self.worker.run(plan, hidden_of(batch), ends)
        sampled = [self._sample(rows) for rows in batch]
        deliver = self.worker.delivery(plan, batch, sampled)
        self._under_way.append(StepUnderWay(batch, sampled, deliver))

    def _sample(self, rows: Rows) -> list[int]:
        """Return the ids that a step yields for a request, which goes on behind them."""
        life = self._lives[rows.request_id]
        life.position = rows.start + rows.num_rows - rows.num_drafts
        num_accepted = self._rng.randint(0, rows.num_drafts)
        life.in_flight.append(rows.num_drafts - num_accepted)
        if life.position < life.num_known:
            return []
        first = life.position
        life.position += num_accepted
        life.num_known = life.position + 1
        found: list[int] = TOKEN_IDS[first : life.num_known].tolist()
        return found

    def _deliver(self) -> set[str]:
        """Let the host know the oldest step; return the requests that have ended with it."""
        step = self._under_way.popleft()
        results, num_kept, ended = step.deliver(), dict[str, int](), set[str]()
        for rows, ids in zip(step.batch, step.sampled, strict=True):
            life = self._lives.get(rows.request_id)
            if life is None:
                continue
            life.in_flight.popleft()
            num_kept[rows.request_id] = min(len(ids), life.end - life.num_delivered)
            life.num_delivered += num_kept[rows.request_id]
            if life.num_delivered == life.end:
                ended.add(rows.request_id)
        self.worker.outbox.absorb(results, num_kept)
        for name in ended:
            payload = self.worker.take(name, final=True)
            assert payload is not None
            self.found[name] = payload
            self.worker.outbox.close(name)
            del self._lives[name]
        return ended


def drawn(seed: int) -> dict[str, CompiledRequest]:
    """Return requests with up to four operations each."""
    rng = random.Random(seed)
    found = {}
    for index in range(4):
        raws = [
            one | {"name": f"n{number}"} if one["op"] in {"capture", "probe", "logit_lens"} else one
            for number, one in enumerate(rng.sample(OPERATIONS, rng.randint(1, 4)))
        ]
        found[f"r{index}"] = compiled(raws, PROMPT_LEN)
    return found


def without_drafts(payload: Payload, request: CompiledRequest) -> Told | None:
    """Return what a payload says, but for drafts and preemption."""
    assert payload.info is not None
    info = msgspec.structs.replace(payload.info, drafted_rows=0, refused_rows=0, recomputed_tokens=0)
    records = [
        # The order in which the rows of a mean are added decides about its last digits.
        msgspec.structs.replace(
            record, parts=[(np.frombuffer(part, np.float32) * 100).round().tobytes() for part in record.parts]
        )
        if request.plan.ops[record.op].reduce == "mean"
        else record
        for record in payload.records
    ]
    return told(msgspec.structs.replace(payload, info=info, records=records))


@pytest.mark.parametrize("num_late", [0, 1, 2])
def test_results_are_the_same_with_and_without_drafts(num_late: int) -> None:
    num_preempted = num_drafted = num_refused = 0
    for seed in range(25):
        requests = drawn(seed)
        alone = Engine(seed, requests, has_drafts=False, num_late=0).run()
        engine = Engine(seed, requests, has_drafts=True, num_late=num_late)
        for name, payload in engine.run().items():
            wanted = without_drafts(alone[name], requests[name])
            assert without_drafts(payload, requests[name]) == wanted, (seed, name)
            assert payload.info is not None
            num_drafted += payload.info.drafted_rows
            num_refused += payload.info.refused_rows
        num_preempted += engine.num_preempted
    assert num_preempted > 20
    assert num_drafted > num_refused > 100


@pytest.mark.parametrize("num_late", [0, 1])
def test_a_limit_that_is_kept_without_drafts_is_kept_with_them(num_late: int) -> None:
    for seed in range(40):
        requests = {"r0": drawn(seed)["r0"]}
        alone = Engine(seed, requests, has_drafts=False, num_late=0, preempts=False)
        alone.run()
        options: dict[str, Any] = {"has_drafts": True, "num_late": num_late, "preempts": False}
        within = Engine(seed, requests, max_request_bytes=alone.most_bytes, **options)
        assert within.run()["r0"].failure is None, seed
        if (
            any(op.reads and op.reduce == "none" for op in requests["r0"].plan.ops)
            and alone.most_bytes > 1000
        ):
            beyond = Engine(seed, requests, max_request_bytes=alone.most_bytes // 2, **options)
            failure = beyond.run()["r0"].failure
            assert failure is not None, seed
            assert failure.code == "capture_too_large"


def test_operations_that_depend_on_positions_take_no_drafts() -> None:
    def takes(**operation: Any) -> bool:
        return takes_drafts(compiled([{"name": "n"} | operation], PROMPT_LEN).plan)

    capture: dict[str, Any] = {"op": "capture", "at": "layers.0.output"}
    where: dict[str, Any]
    for where in ({"phase": "generated"}, {"tokens": [1]}, {"range": [2, None]}, {"positions": [1]}):
        assert takes(**capture, where=where), where
        assert takes(**capture, where={"exclude": where}), where
    assert takes(**capture)
    for where in (
        {"range": [0, 9]},
        {"range": [8, None]},
        {"positions": [2, 8]},
        {"exclude": {"range": [7, 9]}},
    ):
        assert not takes(**capture, where=where), where
    samples = {"op": "capture", "at": "samples"}
    assert takes(**samples)
    assert not takes(**samples, where={"tokens": [1]})


def test_a_prompt_that_goes_on_behind_rows_from_the_cache_keeps_its_positions() -> None:
    prompt_len = 20
    capture = {"op": "capture", "at": "layers.0.output", "name": "n"}
    worker = Worker(shares=True)
    worker.num_known = prompt_len
    request = compiled([capture], prompt_len)
    worker.outbox.open("r", request.plan, stops_outside=False)
    worker.begin({"r": request}, set())
    # It is preempted after eight tokens, and finds sixteen in the cache when it returns.
    for rows, ids in ((Rows("r", 0, 0, 8), []), (Rows("r", 0, 16, 6, 2), [1, 2]), (Rows("r", 0, 22, 1), [3])):
        batch = [rows]
        plan = worker.plan(batch)
        worker.run(plan, hidden_of(batch), torch.from_numpy(PlayedStep(batch, shares=True).logits_rows()))
        results = worker.delivery(plan, batch, [ids])()
        worker.outbox.absorb(results, {"r": len(ids)})
    payload = worker.take("r", final=True)
    assert payload is not None
    assert [position for record in payload.records for position in record.positions] == [
        *range(8),
        *range(16, 22),
    ]
