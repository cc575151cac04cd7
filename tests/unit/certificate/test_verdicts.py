"""The verdict on each pair of measurements, from small tensors."""

from __future__ import annotations

import math

import pytest
import torch

from api_schemas.errors import ApiError, ErrorCode
from nnsight_engine.certificate.certificate import (
    TOLERANCES,
    Bounds,
    Status,
    Verdict,
    judge_movement,
    judge_tokens,
    judge_value,
)
from nnsight_engine.certificate.measurements import Failure, all_measured, measured
from nnsight_engine.core.errors import InterventionError

FP32 = Bounds.of(TOLERANCES["float32"])
VALUE = torch.tensor([[1.0, -4.0], [0.5, 2.0]])
PLAIN = torch.tensor([1.0, 2.0, -10.0, 3.0])
MOVE = torch.tensor([0.5, -1.0, 2.0, 0.0])
REFUSAL = Failure("ApiError: not here", is_refusal=True)
BREAK = Failure("TypeError: oh", is_refusal=False)


MASKED = torch.tensor([1.0, -math.inf])


@pytest.mark.parametrize(
    ("wanted", "got", "dtype", "is_ok"),
    [
        (VALUE, VALUE + 0.003, "float32", True),  # within a thousandth of the largest
        *(
            (VALUE, got, "float32", False)
            for got in (VALUE + 0.005, VALUE * math.nan, VALUE * math.inf, -VALUE)
        ),
        (VALUE, VALUE.reshape(4), "float32", False),
        (MASKED, MASKED.clone(), "float32", True),
        (MASKED, torch.tensor([1.0, 0.0]), "float32", False),
        (torch.zeros(3), torch.zeros(3), "float32", True),
        (torch.zeros(3), torch.ones(3), "float32", False),
        (VALUE, VALUE * 1.01, "bfloat16", True),
        (VALUE, VALUE * 1.01, "float32", False),
        (VALUE, BREAK, "float32", False),
    ],
)
def test_a_value_is_ok_or_differs(
    wanted: torch.Tensor, got: torch.Tensor | Failure, dtype: str, *, is_ok: bool
) -> None:
    verdict = judge_value(wanted, got, Bounds.of(TOLERANCES[dtype]))
    assert verdict.status is (Status.OK if is_ok else Status.DIFFERS)


def test_a_verdict_has_the_difference_or_the_reason() -> None:
    assert judge_value(VALUE, VALUE + 0.003, FP32).difference == pytest.approx(0.003 / 4, rel=1e-3)
    difference = judge_value(VALUE, VALUE + 0.005, FP32).difference
    assert difference is not None
    assert difference > FP32.value
    assert "[4] instead of [2, 2]" in judge_value(VALUE, VALUE.reshape(4), FP32).reason


@pytest.mark.parametrize(
    ("wanted", "got", "reason"),
    [
        (None, VALUE, "transformers does not offer the point"),
        (VALUE, None, "vLLM does not offer the point"),
        (BREAK, VALUE, "transformers: TypeError: oh"),
        (VALUE, REFUSAL, "vLLM: ApiError: not here"),
    ],
)
def test_what_one_side_lacks_cannot_be_compared(
    wanted: torch.Tensor | Failure | None, got: torch.Tensor | Failure | None, reason: str
) -> None:
    assert judge_value(wanted, got, FP32) == Verdict(Status.NOT_COMPARED, None, reason)
    assert judge_movement(wanted, got, (PLAIN, PLAIN), FP32) == Verdict(Status.NOT_COMPARED, None, reason)


NEAR = PLAIN + torch.tensor([1e-4, 0.0, -1e-4, 0.0])
OFF = PLAIN + torch.tensor([0.01, -0.01, 0.0, 0.0])


@pytest.mark.parametrize(
    ("wanted", "got", "own", "status"),
    [
        (PLAIN + MOVE, NEAR + MOVE, NEAR, Status.OK),
        # An accepted write without an effect.
        (PLAIN + MOVE, PLAIN.clone(), PLAIN, Status.SILENTLY_WRONG),
        (PLAIN + MOVE, PLAIN + 0.1, PLAIN + 0.1, Status.SILENTLY_WRONG),
        *(
            (PLAIN + MOVE, PLAIN + move, PLAIN, Status.DIFFERS)
            for move in (-MOVE, 0.5 * MOVE, MOVE.roll(1), MOVE * math.nan)
        ),
        (PLAIN.clone(), PLAIN + MOVE, PLAIN, Status.DIFFERS),
        (PLAIN + MOVE, BREAK, PLAIN, Status.DIFFERS),
        # As small as the engines differ anyway.
        (PLAIN + 0.005 * MOVE, OFF - 0.005 * MOVE, OFF, Status.NOT_COMPARED),
        (PLAIN.clone(), PLAIN.clone(), PLAIN, Status.NOT_COMPARED),
    ],
)
def test_a_movement_is_judged_by_that_of_transformers(
    wanted: torch.Tensor, got: torch.Tensor | Failure, own: torch.Tensor, status: Status
) -> None:
    assert judge_movement(wanted, got, (PLAIN, own), FP32).status is status


def test_tokens_differ_unless_the_choice_was_nearly_a_tie() -> None:
    logits = torch.tensor([[5.0, 1.0, 0.0], [3.0, 2.999, 0.0]])
    assert judge_tokens([0, 0], [0, 0], logits, FP32).status is Status.OK
    assert judge_tokens([0, 0], [0, 1], logits, FP32).status is Status.NOT_COMPARED
    assert judge_tokens([0, 0], [1, 0], logits, FP32).status is Status.DIFFERS
    assert judge_tokens([0, 0], [0], logits, FP32).status is Status.DIFFERS


def test_a_typed_error_is_a_refusal_and_an_internal_or_any_other_one_is_not() -> None:
    def failed(error: Exception) -> Failure:
        def raising() -> torch.Tensor:
            raise error

        found = measured(raising)
        assert isinstance(found, Failure)
        return found

    assert failed(ApiError(ErrorCode.UNKNOWN_POINT, "no such point")).is_refusal
    assert not failed(ApiError(ErrorCode.INTERNAL, "broken")).is_refusal
    assert not failed(InterventionError("intervention_failed", "never reached")).is_refusal
    assert failed(KeyError("x\ny")) == Failure("KeyError: 'x\\ny'", is_refusal=False)


def test_one_failure_hides_no_other_value() -> None:
    def read(names: list[str]) -> dict[str, torch.Tensor]:
        if "bad" in names:
            raise ValueError("bad")
        return dict.fromkeys(names, VALUE)

    found = all_measured(["a", "bad", "b"], read)
    assert found["a"] is VALUE
    assert found["b"] is VALUE
    assert found["bad"] == Failure("ValueError: bad", is_refusal=False)
