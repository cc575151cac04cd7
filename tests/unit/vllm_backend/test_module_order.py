"""The model's way through its modules, cut at the taps, and what a block does with them beside its run."""

from __future__ import annotations

from types import CodeType

import pytest
import torch

from nnsight_engine.vllm_backend.traces.module_order import ModuleOrder
from nnsight_engine.vllm_backend.traces.tier_predictor import TierPredictor
from nnsight_engine.vllm_backend.traces.trace_dispatcher import TraceDispatcher

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


def test_what_is_passed_on_the_way_to_each_tap_is_known_and_needs_no_modules() -> None:
    route = ModuleOrder("model", ORDER, EXITS, range(3), ENTRY)
    ways = [list(route.order[: route.ahead[tap]]) for tap in range(3)]
    passed = [*ORDER[:4], ENTRY, *ORDER[4:]]
    assert ways == [passed[:4], passed[:7], passed[:11]]
    assert [route.exits[tap] for tap in range(3)] == [ENTRY, *EXITS]
    assert route.last == 2
    assert route.served == {ENTRY, *EXITS, "result", "model.logits.output", "model.samples.output"}
    last = ModuleOrder("model", ORDER, EXITS, [2], ENTRY)
    assert set(EXITS) & last.served == {EXITS[1]}, "a layer without a tap is not served"
    assert last.ahead == {2: 11}


@pytest.mark.parametrize("order", [ORDER[:6], [*ORDER[10:], *ORDER[:10]]])
def test_a_model_that_does_not_run_its_layers_in_order_has_no_route(order: list[str]) -> None:
    with pytest.raises(ValueError, match="in order"):
        ModuleOrder("model", order, EXITS, range(3), ENTRY)


def test_equal_blocks_are_expected_to_want_the_same_until_they_are_forgotten() -> None:
    def code(number: int) -> CodeType:
        return compile(f"x = {number}", "block", "exec")

    habits = TierPredictor()
    habits.note(code(0), elsewhere=True)
    assert habits.expects_modules(code(0))
    assert not habits.expects_modules(code(1))
    habits.note(code(0), elsewhere=False)
    assert not habits.expects_modules(code(0))
    for number in range(1000):
        habits.note(code(number), elsewhere=True)
    assert not habits.expects_modules(code(0))
    assert habits.expects_modules(code(999))


def test_a_module_that_writes_into_its_arguments_writes_into_copies() -> None:
    given, residual = torch.zeros(2, 3), torch.zeros(3)
    seen = given._version, residual._version

    def fused(hidden: torch.Tensor, pair: list[torch.Tensor], *, residual: torch.Tensor) -> torch.Tensor:
        pair[0].add_(2)
        return hidden.add_(1).add_(residual.add_(3)).add_(pair[0])

    result = TraceDispatcher().applied("model.norm", fused, (given, [given]), {"residual": residual})
    assert result.tolist() == [[6.0] * 3] * 2
    assert not given.any()
    assert not residual.any()
    # By these a block's edits are known, which go back into the model.
    assert (given._version, residual._version) == seen
