"""Budgets of code: the same end each time, at the user's line, as an error of its own type, and no later."""

from __future__ import annotations

import traceback
from types import CellType
from typing import Any

import pytest
import torch

from nnsight_engine import NNsight
from nnsight_engine.sandbox.restricted import Budget, restricted_policy
from nnsight_engine.serialization import (
    BudgetError,
    FuelError,
    SandboxError,
    decode_trace,
    encode_error,
    restore_error,
)
from nnsight_engine.serialization.limits import Policy
from nnsight_engine.tracing.tracer import Tracer
from tests.security.host import Small, message_of, run


def block(code: str, policy: Policy, **variables: Any) -> dict[str, CellType]:
    info = decode_trace(message_of(code, **variables), resolve=lambda name: name, policy=policy).blocks[0]
    Tracer().compile_on(info)()
    return info.variables


@pytest.mark.parametrize(
    "code",
    [
        "while True: n += 1",
        "for i in [0] * 100: n += 1",
        "def more():\n    global_n.append(1)\n    more()\nglobal_n = counted\nmore()",
        "[counted.append(1) for i in 'abc' for j in [0] * 100]",
        "f = lambda: counted.append(1)\nwhile f() is None: pass",
    ],
)
def test_code_ends_at_the_same_step_each_time(code: str) -> None:
    reached = []
    for _ in range(3):
        counted: list[int] = []
        policy = restricted_policy(Budget(max_steps=50))
        info = decode_trace(
            message_of(f"n, counted\n{code}", n=0, counted=counted), resolve=lambda name: name, policy=policy
        ).blocks[0]
        with pytest.raises(FuelError, match="more than 50 steps") as caught:
            Tracer().compile_on(info)()
        reached.append((info.variables["n"].cell_contents, len(info.variables["counted"].cell_contents)))
        assert "<attempt>" in str(caught.value)
    assert len(set(reached)) == 1
    assert max(reached[0]) >= 24


def test_steps_that_are_allowed_are_enough() -> None:
    cells = block("for i in range(49): n += 1", restricted_policy(Budget(max_steps=49)), n=0)
    assert cells["n"].cell_contents == 49


def test_the_error_names_the_line_here_and_at_the_client() -> None:
    model = NNsight(Small())
    code = "h = model.layer1.output\nn = 0\nwhile True:\n    n += 1\n"
    with pytest.raises(FuelError) as caught:
        run(message_of(code), model, restricted_policy(Budget(max_steps=10)), torch.ones(1, 5))
    assert caught.value.line == 4 or caught.value.line == 5
    restored = restore_error(encode_error(caught.value))
    assert isinstance(restored, FuelError)
    assert restored.line == caught.value.line
    assert "while True:" in "".join(traceback.format_exception(restored))
    assert "budget.py" not in "".join(traceback.format_exception(restored))


def test_a_refusal_names_the_line_and_the_way_out() -> None:
    model = NNsight(Small())
    with pytest.raises(SandboxError, match=r"weight `weight` .* call the module") as caught:
        run(
            message_of("n = 1\nw = model.layer1.weight"), model, restricted_policy(Budget()), torch.ones(1, 5)
        )
    assert caught.value.line == 3
    restored = restore_error(encode_error(caught.value))
    assert type(restored) is SandboxError
    with pytest.raises(SandboxError, match=r"the attribute `__class__` .* at line 3") as refused:
        run(message_of("n = 1\nw = n.__class__"), model, restricted_policy(Budget()), torch.ones(1, 5))
    assert refused.value.line == 3


def test_other_blocks_of_the_process_have_budgets_of_their_own() -> None:
    model = NNsight(Small())
    with pytest.raises(FuelError):
        run(message_of("while True: pass"), model, restricted_policy(Budget(max_steps=10)), torch.ones(1, 5))
    saved = run(
        message_of("out = model.output.save()"),
        model,
        restricted_policy(Budget(max_steps=10)),
        torch.ones(1, 5),
    )["saved"]
    assert torch.allclose(saved["out"], Small()(torch.ones(1, 5)))


def test_what_a_finally_keeps_back_is_told_at_the_end() -> None:
    code = (
        "def g():\n    try:\n        while True: pass\n    finally:\n        yield 1\nfor i in g(): n = i\n"
    )
    with pytest.raises(FuelError):
        block(code, restricted_policy(Budget(max_steps=10)), n=0)


def test_bytes_of_tensors_are_counted_whatever_makes_them() -> None:
    for code in (
        "for i in range(100): y = x.clone()", "for i in range(100): y = x + 1", "for i in range(100): y = -x",
        "for i in range(100): y = torch.relu(x)", "for i in range(100): y = x[torch.arange(1000)]",
        "for i in range(100): y = torch.zeros(1000, 1000)", "for i in range(100): y = x > 0",
        "for i in range(100): y = x.numpy().copy()", "for i in range(100): x = x * 2",
    ):  # fmt: skip
        with pytest.raises(BudgetError, match="bytes"):
            block(code, restricted_policy(Budget(max_bytes=20_000_000)), x=torch.ones(1000, 1000))
        block(code, restricted_policy(Budget(max_bytes=2**30)), x=torch.ones(1000, 1000))


def test_views_cost_nothing() -> None:
    code = "for i in range(100): y = x[1:].T.unsqueeze(0)\nfor i in range(100): y = x.expand(9, 1000, 1000)"
    block(code, restricted_policy(Budget(max_bytes=100_000)), x=torch.ones(1000, 1000))


def test_saved_bytes_are_counted() -> None:
    model = NNsight(Small())
    code = "x = torch.ones(1000, 1000)\nx.save()\n"

    def policy() -> Policy:
        return restricted_policy(Budget(max_saved_bytes=4_000_000))

    run(message_of(code), model, policy(), torch.ones(1, 5))
    for again in ("x[1:].save()", "save([x[1:]])"):
        with pytest.raises(BudgetError, match="saved more than 4,000,000 bytes"):
            run(
                message_of(code + again),
                model,
                restricted_policy(Budget(max_saved_bytes=4_000_000)),
                torch.ones(1, 5),
            )


def test_large_but_honest_work_passes() -> None:
    code = """
y = x @ x.T
z = torch.softmax(y, -1)
w = torch.einsum('ij,jk->ik', y, z)
v = x[:, None] * x[None, :4]
u = torch.cat([x] * 20)
t = x.repeat(3, 3)
s = torch.cdist(x, x)
r = torch.stack([x, x])
q = x.T.contiguous()
"""
    cells = block(code, restricted_policy(Budget(max_bytes=2**30)), x=torch.rand(1000, 500))
    x = cells["x"].cell_contents
    assert torch.equal(cells["y"].cell_contents, x @ x.T)
    assert cells["u"].cell_contents.shape == (20_000, 500)
