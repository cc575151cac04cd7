"""The verdict on each pair of measurements, from small tensors."""

from __future__ import annotations

import math

import pytest
import torch

from api_schemas.errors import ApiError, ErrorCode
from nnsight_engine.certificate.measurements import Failure, all_measured, measured
from nnsight_engine.certificate.verdicts import (
    TOLERANCES,
    Bounds,
    Status,
    Verdict,
    judge_movement,
    judge_tokens,
    judge_value,
)
from nnsight_engine.core.errors import InterventionError

FP32 = Bounds.of(TOLERANCES["float32"])
VALUE = torch.tensor([[1.0, -4.0], [0.5, 2.0]])
PLAIN = torch.tensor([1.0, 2.0, -10.0, 3.0])
MOVE = torch.tensor([0.5, -1.0, 2.0, 0.0])
REFUSAL = Failure("ApiError: not here", is_refusal=True)
BREAK = Failure("TypeError: oh", is_refusal=False)


def judged(wanted: torch.Tensor | Failure, got: torch.Tensor | Failure, own: torch.Tensor = PLAIN) -> Verdict:
    return judge_movement(wanted, got, (PLAIN, own), FP32)


def test_a_value_within_a_thousandth_of_the_largest_is_ok() -> None:
    verdict = judge_value(VALUE, VALUE + 0.003, FP32)
    assert verdict.status is Status.OK
    assert verdict.difference == pytest.approx(0.003 / 4, rel=1e-3)


@pytest.mark.parametrize("got", [VALUE + 0.005, VALUE * math.nan, VALUE * math.inf, -VALUE])
def test_another_value_differs(got: torch.Tensor) -> None:
    verdict = judge_value(VALUE, got, FP32)
    assert verdict.status is Status.DIFFERS
    assert verdict.difference is not None
    assert verdict.difference > FP32.value


def test_a_value_of_another_shape_differs_and_its_reason_names_both() -> None:
    verdict = judge_value(VALUE, VALUE.reshape(4), FP32)
    assert verdict.status is Status.DIFFERS
    assert "[4] instead of [2, 2]" in verdict.reason


def test_masked_elements_must_be_masked_on_both_sides() -> None:
    masked = torch.tensor([1.0, -math.inf])
    assert judge_value(masked, masked.clone(), FP32).status is Status.OK
    assert judge_value(masked, torch.tensor([1.0, 0.0]), FP32).status is Status.DIFFERS


def test_a_value_of_zeros_is_compared_by_itself() -> None:
    assert judge_value(torch.zeros(3), torch.zeros(3), FP32).status is Status.OK
    assert judge_value(torch.zeros(3), torch.ones(3), FP32).status is Status.DIFFERS


def test_bounds_are_those_of_the_dtype() -> None:
    assert judge_value(VALUE, VALUE * 1.01, Bounds.of(TOLERANCES["bfloat16"])).status is Status.OK
    assert judge_value(VALUE, VALUE * 1.01, FP32).status is Status.DIFFERS


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


def test_an_error_of_vllm_that_is_no_refusal_differs() -> None:
    assert judge_value(VALUE, BREAK, FP32).status is Status.DIFFERS
    assert judged(PLAIN + MOVE, BREAK).status is Status.DIFFERS


def test_the_same_movement_is_ok_although_the_engines_differ_a_little_without_it() -> None:
    own = PLAIN + torch.tensor([1e-4, 0.0, -1e-4, 0.0])
    assert judged(PLAIN + MOVE, own + MOVE, own).status is Status.OK


def test_an_accepted_write_without_an_effect_is_silently_wrong() -> None:
    for own in (PLAIN, PLAIN + 0.1):
        assert judged(PLAIN + MOVE, own.clone(), own).status is Status.SILENTLY_WRONG


@pytest.mark.parametrize("move", [-MOVE, 0.5 * MOVE, MOVE.roll(1), MOVE * math.nan])
def test_another_movement_differs(move: torch.Tensor) -> None:
    assert judged(PLAIN + MOVE, PLAIN + move).status is Status.DIFFERS


def test_a_movement_that_transformers_does_not_make_differs() -> None:
    assert judged(PLAIN.clone(), PLAIN + MOVE).status is Status.DIFFERS


def test_a_movement_as_small_as_the_engines_differ_anyway_cannot_be_compared() -> None:
    own = PLAIN + torch.tensor([0.01, -0.01, 0.0, 0.0])
    assert judged(PLAIN + 0.005 * MOVE, own - 0.005 * MOVE, own).status is Status.NOT_COMPARED
    assert judged(PLAIN.clone(), PLAIN.clone()).status is Status.NOT_COMPARED


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
