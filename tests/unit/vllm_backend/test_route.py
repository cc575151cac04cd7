"""The model's way through its modules, cut at the taps."""

from __future__ import annotations

from types import CodeType

import pytest

from nnsight_engine.vllm_backend.traces.module_order import ModuleOrder
from nnsight_engine.vllm_backend.traces.tier_predictor import TierPredictor

ORDER = [
    "model.input",
    "model.embed_tokens.input",
    "model.embed_tokens.output",
    "model.layers.0.input",
    "model.layers.0.mlp.input",
    "model.layers.0.mlp.output",
    "model.layers.0.output",
    "model.layers.1.input",
    "model.layers.1.mlp.input",
    "model.layers.1.mlp.output",
    "model.layers.1.output",
    "model.norm.input",
    "model.norm.output",
    "model.output",
]
ENTRY = "model.embed.output"
EXITS = ["model.layers.0.output", "model.layers.1.output"]


def test_what_is_passed_on_the_way_to_each_tap_is_known() -> None:
    route = ModuleOrder("model", ORDER, EXITS, range(3), ENTRY)
    ways = [list(route.order[: route.ahead[tap]]) for tap in range(3)]
    passed = [*ORDER[:4], ENTRY, *ORDER[4:]]
    assert ways == [passed[:4], passed[:7], passed[:11]]
    assert [route.exits[tap] for tap in range(3)] == [ENTRY, *EXITS]
    assert route.last == 2


def test_layers_outputs_and_what_follows_the_model_need_no_modules() -> None:
    route = ModuleOrder("model", ORDER, EXITS, range(3), ENTRY)
    assert route.served == {ENTRY, *EXITS, "result", "model.logits.output", "model.samples.output"}


def test_a_layer_without_a_tap_is_not_served() -> None:
    route = ModuleOrder("model", ORDER, EXITS, [2], ENTRY)
    assert EXITS[0] not in route.served
    assert EXITS[1] in route.served
    assert route.ahead == {2: 11}


@pytest.mark.parametrize("order", [ORDER[:6], [*ORDER[10:], *ORDER[:10]]])
def test_a_model_that_does_not_run_its_layers_in_order_has_no_route(order: list[str]) -> None:
    with pytest.raises(ValueError, match="in order"):
        ModuleOrder("model", order, EXITS, range(3), ENTRY)


def code(number: int) -> CodeType:
    return compile(f"x = {number}", "block", "exec")


def test_equal_blocks_are_expected_to_want_the_same() -> None:
    habits = TierPredictor()
    habits.note(code(1), elsewhere=True)
    habits.note(code(2), elsewhere=False)
    assert habits.expects_modules(code(1))
    assert not habits.expects_modules(code(2))
    habits.note(code(1), elsewhere=False)
    assert not habits.expects_modules(code(1))


def test_the_oldest_blocks_are_forgotten() -> None:
    habits = TierPredictor()
    for number in range(1000):
        habits.note(code(number), elsewhere=True)
    assert not habits.expects_modules(code(0))
    assert habits.expects_modules(code(999))
