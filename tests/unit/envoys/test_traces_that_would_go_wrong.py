"""Traces that could quietly do less than they say: each does all of it, or says what it cannot."""

from __future__ import annotations

import gc
import linecache
import weakref
from typing import Any

import pytest
import torch

from nnsight_engine import NNsight, save
from nnsight_engine.interleaving.events import MissedProviderError
from tests.hook_reference import recorded
from tests.small_models import Rows


class Recurrent(torch.nn.Module):
    """One layer before a cell that is called four times."""

    def __init__(self) -> None:
        super().__init__()
        self.before = torch.nn.Linear(3, 3)
        self.cell = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        for _ in range(4):
            x = torch.tanh(self.cell(x))
        return x


X = torch.tensor([[1.0, -2.0, 0.5]])


@pytest.fixture
def recurrent() -> NNsight:
    torch.manual_seed(0)
    return NNsight(Recurrent())


@pytest.fixture
def linear() -> Rows:
    torch.manual_seed(0)
    return Rows(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)))


def test_each_call_of_a_cell_is_a_step(recurrent: NNsight) -> None:
    with recorded(recurrent._module, "cell") as outputs, recurrent.trace(X) as tracer:
        seen = save([])
        for step in tracer.iter[:]:
            seen.append((step, recurrent.cell.output))
        after = save("after the loop")
    assert [step for step, _ in seen] == [0, 1, 2, 3]
    assert all(torch.equal(value, call) for (_, value), call in zip(seen, outputs["cell"], strict=True))
    assert after == "after the loop"


def test_a_loop_that_asks_for_what_comes_once_only_is_an_error(recurrent: NNsight) -> None:
    with pytest.raises(MissedProviderError, match=r"model\.before\.output\.i1"):
        with recurrent.trace(X) as tracer:
            for _ in tracer.iter[:]:
                _ = recurrent.before.output
                recurrent.cell.output[:] = 0


def test_a_barrier_trace_can_be_validated(linear: Rows) -> None:
    with linear.trace(validate=True) as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(X):
            hidden = linear[0].output.clone()
            barrier()
        with tracer.invoke(2 * X):
            barrier()
            linear[0].output = hidden
            patched = save(linear.output)
    torch.testing.assert_close(patched, linear._module(X))


def test_edits_apply_outside_traces_too(linear: Rows) -> None:
    plain = linear(X)
    with linear.edit() as edited:
        linear[0].output[:] = 0
    with edited.trace(X):
        traced = save(edited.output)
    assert torch.equal(edited(X), traced)
    assert torch.equal(linear(X), plain)
    assert not torch.equal(traced, plain)


def test_parts_of_a_model_keep_no_edits(linear: Rows) -> None:
    with pytest.raises(ValueError, match="call edit\\(\\) on its root"), linear[0].edit(inplace=True):
        linear[0].output[:] = 0


def test_a_cache_outside_an_invoke_is_an_error(linear: Rows) -> None:
    with pytest.raises(ValueError, match="inside an invoke"), linear.trace() as tracer:
        _ = tracer.cache()
        with tracer.invoke(X):
            pass


def test_skips_with_the_wrong_number_of_rows_are_an_error(linear: Rows) -> None:
    with pytest.raises(ValueError, match="owns 1 of 2 rows"), linear.trace() as tracer:
        for rows in (2, 0):
            with tracer.invoke(X):
                linear[1].skip(torch.zeros(rows, 2))


@pytest.mark.parametrize("backward", [False, True])
def test_what_was_not_saved_is_gone_at_once(linear: Rows, backward: bool) -> None:
    gc.collect()
    gc.disable()
    try:
        with linear.trace(X):
            hidden = linear[0].output
            kept = save([weakref.ref(hidden)])
            if backward:
                with linear.output.sum().backward():
                    kept.append(weakref.ref(hidden.grad))
        assert [reference() for reference in kept] == [None] * len(kept)
    finally:
        gc.enable()


@pytest.mark.parametrize("what", ["break", "continue"])
@pytest.mark.parametrize("around", ["for _ in range(2):", "while True:"])
def test_leaving_a_loop_around_the_block_says_what_to_write(linear: Rows, around: str, what: str) -> None:
    namespace: dict[str, Any] = {"linear": linear, "X": X}
    name = f"<{what} {around}>"
    text = f"{around}\n    with linear.trace(X):\n        linear.output\n        {what}\n"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    with pytest.raises(SyntaxError, match=f"`{what}` cannot refer to a loop around") as caught:
        exec(compile(text, name, "exec"), namespace)
    assert f"if done: {what}" in str(caught.value)
    assert (caught.value.filename, caught.value.lineno) == (name, 4)


def test_the_way_that_the_error_names_works(linear: Rows) -> None:
    turns = []
    for turn in range(5):
        done = False
        with linear.trace(X):
            for _ in range(3):
                if turn < 2:
                    continue
                break
            if turn == 2:
                done = save(True)
        turns.append(turn)
        if done:
            break
    assert turns == [0, 1, 2]


class Pair(torch.nn.Module):
    """A module that unpacks what another returns."""

    def __init__(self) -> None:
        super().__init__()
        self.both = Both()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, _ = self.both(x)
        return torch.as_tensor(first)


class Both(torch.nn.Module):
    """Returns two tensors."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + 1, x


def test_a_tensor_is_not_unpacked_in_place_of_a_tuple() -> None:
    model, rows = NNsight(Pair()), torch.ones(2, 3)
    with (
        pytest.raises(ValueError, match=r"the value is a tuple of 2.* a tensor of 2 rows"),
        model.trace(rows),
    ):
        model.both.output = rows
    with model.trace(rows):
        model.both.output = (10 * rows, *model.both.output[1:])
        out = save(model.output)
    assert torch.equal(out, 10 * rows)


@pytest.mark.parametrize("value", [X, (X,), (X, X), [(X,), None]], ids=["tensor", "one", "two", "none"])
def test_inputs_are_assigned_as_a_pair(linear: Rows, value: Any) -> None:
    with pytest.raises(TypeError, match=r"inputs are a pair \(args, kwargs\)"), linear.trace(X):
        linear[0].inputs = value
    with linear.trace(X):
        linear[0].inputs = [[2 * X], {}]
        out = save(linear[0].output)
    torch.testing.assert_close(out, linear[0]._module(2 * X))


def test_a_model_in_the_trace_of_another_is_named(linear: Rows, recurrent: NNsight) -> None:
    for use in (
        lambda: linear[0].output,
        lambda: setattr(linear[0], "output", X),
        lambda: linear[0].skip(X),
        linear.next,
    ):
        with pytest.raises(ValueError, match=r"another model, Sequential, than .* Recurrent"):
            with recurrent.trace(X):
                use()
    with recurrent.trace(X):
        with linear.trace(X):
            inner = save(linear.output)
        outer = save(recurrent.output)
    torch.testing.assert_close(inner, linear._module(X))
    torch.testing.assert_close(outer, recurrent._module(X))
