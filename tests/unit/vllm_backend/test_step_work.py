"""Steps of requests with much work, played without an engine: none is long, and everybody gets on."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from nnsight_engine.plans.request_plan import OperationKind, PlannedOp, PlannedSite, RequestPlan, WhereRule
from nnsight_engine.plans.work import MAX_WEIGHTS
from nnsight_engine.vllm_backend.fair_scheduler import StepWork

LIMIT = 8.0
SITES = (PlannedSite("output", 0),)
RULES = (WhereRule(), WhereRule(phase="prompt"), WhereRule(phase="generated"), WhereRule(positions=(1, 5)))


@dataclasses.dataclass
class Going:
    """A request: how far it is, and how far it goes."""

    name: str
    plan: RequestPlan
    num_prompt: int
    num_all: int
    done: int = 0

    @property
    def next_chunk(self) -> int:
        """Number of positions that vLLM would compute."""
        return max(1, self.num_prompt - self.done)

    @property
    def is_whole(self) -> bool:
        """Whether that may not be cut."""
        return self.plan.needs_whole_prompt


@st.composite
def goings(draw: st.DrawFn, index: int) -> Going:
    num_prompt = draw(st.integers(1, 30))
    works = draw(st.dictionaries(st.integers(0, 2), st.floats(0.01, 4.0), max_size=3))
    is_whole = draw(st.integers(0, 4)) == 0
    ops = [PlannedOp(OperationKind.LENS, SITES, draw(st.sampled_from(RULES))) for _ in range(3)]
    if is_whole:
        ops.append(PlannedOp(OperationKind.MEAN, SITES))
    weights = draw(st.sampled_from([0.0, 3.0, MAX_WEIGHTS]))
    plan = RequestPlan(num_prompt, tuple(ops), works=works, weights=weights)
    return Going(str(index), plan, num_prompt, num_prompt + draw(st.integers(0, 6)))


@given(st.integers(1, 6).flatmap(lambda n: st.tuples(*(goings(i) for i in range(n)))))
def test_steps_are_short_and_everybody_gets_on(requests: tuple[Going, ...]) -> None:
    """A step has no more work than its limit, but for one position or a prompt that stays whole."""
    work, left = StepWork(), list(requests)
    for one in requests:
        work.add(one.name, one.plan, range(one.num_prompt))
    waited = dict.fromkeys((one.name for one in requests), 0)
    for _ in range(sum(one.num_all for one in requests) + 1):
        left.sort(key=lambda one: not work.was_skipped(one.name))
        work.begin_step(LIMIT)
        chunks = {
            one.name: work.fit(one.name, one.done, one.next_chunk, is_whole=one.is_whole) for one in left
        }
        costly = [one for one in left if work.used_by(one.name)]
        computed = [one.plan.weights for one in left if one.name in work and chunks[one.name]]
        assert sum(computed) <= MAX_WEIGHTS
        assert work.used <= LIMIT + 1e-9 or [chunks[one.name] for one in costly] in (
            [1],
            [costly[0].num_prompt],
        )
        for one in left:
            assert 0 <= chunks[one.name] <= one.next_chunk
            assert one.name in work or chunks[one.name] == one.next_chunk
            waited[one.name] = 0 if chunks[one.name] else waited[one.name] + 1
            assert waited[one.name] < len(requests)
            one.done += chunks[one.name]
        for one in [one for one in left if one.done >= one.num_all]:
            left.remove(one)
            work.discard(one.name)
        if not left:
            break
    assert not left
    assert not work
