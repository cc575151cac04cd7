"""The work of operations: which requests are refused for it, and how it divides a prompt."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_schemas.errors import ApiError, ErrorCode
from nnsight_engine.core.model_spec import LeafSpec, ModelSpec
from nnsight_engine.plans.request_plan import RequestPlan
from nnsight_engine.plans.work import WorkByPosition
from tests.unit.plans.compiling import compiled

PROMPT = [7, 8, 9, 7, 8, 9, 7, 8, 9, 5]
SPEC = ModelSpec(
    name="m",
    architecture="M",
    num_layers=8,
    hidden_size=512,
    vocab_size=50_000,
    dtype="float32",
    max_model_len=64,
    max_num_batched_tokens=32,
    leaves=(LeafSpec("output", (512,), "tap", ("capture", "logit_lens", "steer", "ablate")),),
    max_capture_bytes=2**30,
)
OF_ONE_LAYER = (50_000 * (512 + 128) + 100 * 512) / (512 * (12 * 512 * 8 + 50_000))
"""The lens of a layer: an unembedding, passes over the vocabulary and an activation, per forward pass."""
STEER = {"op": "steer", "at": "layers.1.output", "vector": [1.0] * 512}


def lens(layers: list[int] | None = None, **fields: Any) -> dict[str, Any]:
    chosen = {} if layers is None else {"layers": layers}
    return {"op": "logit_lens", "top_k": 1, **chosen, **fields}


def plan_of(*raw: dict[str, Any], spec: ModelSpec = SPEC) -> RequestPlan:
    return compiled(*raw, spec=spec, prompt=PROMPT).plan


def test_a_lens_costs_an_unembedding_for_each_layer() -> None:
    """One layer, and all eight."""
    assert plan_of(lens([3])).works == {0: pytest.approx(OF_ONE_LAYER)}
    assert plan_of(lens()).works == {0: pytest.approx(8 * OF_ONE_LAYER)}


def test_many_passes_over_activations_count_and_few_do_not() -> None:
    """A vector at eight layers costs a hundredth of the model; forty of them are half of it."""
    everywhere = {"op": "steer", "at": "layers.*.output", "vector": [1.0] * 512}
    assert not plan_of(everywhere).works
    many = plan_of(*[everywhere] * 40).works
    assert sum(many.values()) == pytest.approx(40 * 8 * 512 * 100 / SPEC.forward_work)
    assert len(many) == 40


def test_targets_count() -> None:
    """Each target is compared with the whole vocabulary."""
    (bare,) = plan_of(lens(targets=[])).works.values()
    (many,) = plan_of(lens(targets=list(range(40)))).works.values()
    assert many > 2 * bare


def test_operations_at_one_position_add_up_and_are_refused_together() -> None:
    """Six lenses of all layers are more than allowed at one position, and not at six positions."""
    spec = dataclasses.replace(SPEC, max_work=16.0)
    each = [lens(name=f"l{i}", where={"positions": [i]}) for i in range(6)]
    together = [one | {"where": {"positions": [2]}} for one in each]
    assert len(plan_of(*each, spec=spec).works) == 6
    with pytest.raises(ApiError, match=rf"take {6 * 8 * OF_ONE_LAYER:.0f} times as long") as refused:
        plan_of(*together, spec=spec)
    assert refused.value.code is ErrorCode.TOO_MUCH_WORK
    assert refused.value.param == "interventions"


def test_a_mean_needs_the_whole_prompt_in_one_step() -> None:
    """So it is refused beside work for which the prompt would have to be divided."""
    mean = {"op": "ablate", "at": "layers.1.output", "method": "mean"}
    plan_of(mean, lens([3]))
    with pytest.raises(ApiError, match="whole prompt in one step"):
        plan_of(mean, lens(), spec=dataclasses.replace(SPEC, max_num_batched_tokens=8))


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ({"phase": "prompt"}, [1.0] * 10 + [0.0] * 3),
        ({"phase": "generated"}, [0.0] * 10 + [1.0] * 3),
        ({"positions": [1, -1]}, [0.0, 1.0] + [0.0] * 7 + [1.0] + [0.0] * 3),
        ({"positions": [0, 11]}, [1.0] + [0.0] * 9 + [1.0] * 3),
        ({"tokens": [8]}, [0.0, 1.0, 0.0] * 3 + [0.0] + [1.0] * 3),
        ({"range": [2, 5]}, [0.0] * 2 + [1.0] * 3 + [0.0] * 8),
        ({"phase": "prompt", "exclude": {"tokens": [9]}}, [1.0, 1.0, 0.0] * 3 + [1.0] + [0.0] * 3),
    ],
)
def test_work_is_where_an_operation_acts(where: dict[str, Any], expected: list[float]) -> None:
    """Position by position in the prompt; generated ones alike, as soon as one of them may match."""
    plan = plan_of(lens([3], where=where))
    work = WorkByPosition(plan, PROMPT)
    found = [work.between(i, i + 1) / OF_ONE_LAYER for i in range(13)]
    assert found == pytest.approx(expected)
    assert work.most == pytest.approx(OF_ONE_LAYER)


RULES = st.sampled_from(
    [{}, {"phase": "prompt"}, {"phase": "generated"}, {"positions": [3]}, {"range": [4, 12]}, {"tokens": [8]}]
)


@given(
    wheres=st.lists(RULES, min_size=1, max_size=4),
    start=st.integers(0, 15),
    count=st.integers(1, 20),
    limit=st.floats(0, 12),
)
def test_chunks_are_the_longest_within_a_limit(
    wheres: list[dict[str, Any]], start: int, count: int, limit: float
) -> None:
    """Of all ends of a chunk, the last one whose work is within the limit, as a count shows."""
    ops = [lens([i], where=where, name=f"l{i}") for i, where in enumerate(wheres)]
    work = WorkByPosition(plan_of(*ops), PROMPT)
    within = [n for n in range(count + 1) if work.between(start, start + n) <= limit + 1e-9]
    stop = work.stop_within(start, start + count, limit)
    assert start <= stop <= start + count
    assert abs(stop - start - max(within)) <= (1 if work.between(start, stop) > limit - 1e-6 else 0)
