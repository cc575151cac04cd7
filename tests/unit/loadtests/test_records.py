"""From events to the table: what is counted, when, and what is not."""

from __future__ import annotations

from array import array

import pytest

from loadtests.records import EventKind, Records, percentiles
from loadtests.run_spec import SCENARIOS, SHAPES, Model, RunSpec, phases_of

MODEL = Model(name="m", num_layers=2, width=4, vocab_size=9, max_model_len=9, max_body_bytes=9)


def spec(*kinds: str, shape: str = "steady", has_hostile: bool = False) -> RunSpec:
    phases = phases_of(shape, has_hostile=has_hostile)
    counts = dict.fromkeys(kinds, 1)
    return RunSpec(
        scenario="mixed", shape=shape, url="", model=MODEL, counts=counts, phases=phases, seconds=60
    )


def tell(
    records: Records, told: EventKind, ms: float, phase: str, kind: str = "plain", **rest: object
) -> None:
    tokens = rest.pop("num_tokens", 0)
    context = {"kind": kind, "phase": phase, "num_tokens": tokens}
    records.take(told.value, ms, context, **rest)  # type: ignore[arg-type] # what locust passes


def test_a_row_has_requests_tokens_and_times_of_its_phase() -> None:
    records = Records(spec("plain", "flood", has_hostile=True))
    for ms in (100.0, 300.0):
        tell(records, EventKind.FIRST, ms / 10, "calm")
        tell(records, EventKind.GAP, 5.0, "calm")
        tell(records, EventKind.END, ms, "calm", num_tokens=10)
    tell(records, EventKind.END, 1.0, "calm", exception=ValueError("429 queue_full"))
    tell(records, EventKind.REFUSED, 1.0, "flood", "flood")
    tell(records, EventKind.DISCONNECTED, 1.0, "flood", "flood")
    calm, beside, flood = records.rows()
    assert (calm.kind, calm.phase, calm.num_requests, calm.num_failed, calm.num_tokens) == (
        "plain",
        "calm",
        3,
        1,
        20,
    )
    assert (calm.requests_per_s, calm.tokens_per_s, calm.error_share) == (3 / 15, 20 / 15, 1 / 3)
    assert calm.e2e_ms is not None
    assert (calm.e2e_ms.num, calm.e2e_ms.p50) == (2, 200.0)
    assert calm.measure("ttft_p50") == 20.0
    assert (beside.phase, beside.num_requests, beside.e2e_ms) == ("flood", 0, None)
    assert (flood.kind, flood.phase, flood.num_requests, flood.num_refused, flood.num_left) == (
        "flood",
        "flood",
        2,
        1,
        1,
    )
    assert (flood.error_share, flood.measure("e2e_p50")) == (0, None)
    assert records.errors == {"plain: 429 queue_full": 1}


def test_percentiles_are_of_all_samples() -> None:
    found = percentiles(array("d", range(101)))
    assert found is not None
    assert (found.num, found.p50, found.p95, found.p99) == (101, 50, 95, 99)
    assert percentiles(array("d")) is None


def test_a_measure_that_there_is_not_is_named() -> None:
    (row,) = Records(spec("plain")).rows()
    with pytest.raises(ValueError, match=r"ttft_p50.*got 'ttft_p42'"):
        row.measure("ttft_p42")


@pytest.mark.parametrize("shape", SHAPES)
def test_phases_fill_the_run_and_then_it_is_over(shape: str) -> None:
    run = spec("plain", shape=shape, has_hostile=True)
    assert sum(phase.share for phase in run.phases) == pytest.approx(1)
    assert run.phase_at(0) == run.phases[0]
    assert [phase.is_counted for phase in run.phases] == [False] + [True] * (len(run.phases) - 1)
    assert run.phase_at(59.9) == run.phases[-1]
    assert run.phase_at(60.1) is None
    assert [phase for phase in run.phases if phase.is_hostile], "a hostile tenant comes in every shape"
    assert not run.phases[0].is_hostile, "and there is a time without, to compare with"


def test_every_scenario_is_in_the_mixed_one_and_has_plain_requests_to_compare_with() -> None:
    assert {kind for kinds in SCENARIOS.values() for kind in kinds} == set(SCENARIOS["mixed"])
    assert all("plain" in kinds for kinds in SCENARIOS.values())
