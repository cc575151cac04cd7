"""What a load test counts, what it takes for a token or a good answer, and what it is judged by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loadtests.refusals import EXPECTED
from loadtests.run_spec import SHAPES, Model, phases_of
from loadtests.streams import Stream
from loadtests.summary import Percentiles, Summary, SummaryRow
from loadtests.thresholds import DEFAULT_FILE, Threshold, ThresholdError, judged, read

MODEL = Model(name="m", num_layers=2, width=4, vocab_size=9, max_model_len=9, max_body_bytes=9)


def times(middle: float) -> Percentiles:
    return Percentiles(num=9, p50=middle, p95=2 * middle, p99=3 * middle)


def row(kind: str, phase: str = "calm", *, itl: float | None = None, **rest: Any) -> SummaryRow:
    counts = {"num_requests": 5, "num_refused": 0, "num_left": 0, "num_failed": 0, "error_share": 0.0}
    rates = {"num_tokens": 50, "requests_per_s": 0.5, "tokens_per_s": 5.0}
    measured = None if itl is None else times(itl)
    return SummaryRow(kind=kind, phase=phase, seconds=10, itl_ms=measured, **{**counts, **rates, **rest})


def summary(*rows: SummaryRow, **rest: Any) -> Summary:
    return Summary(
        scenario="mixed", shape="steady", url="", model="m", seconds=10, users=1, client_cpu=0.1,
        rows=list(rows), errors={}, **rest,
    )  # fmt: skip


# What is sent and counted.


@pytest.mark.parametrize(
    ("kind", "status", "code", "is_good"),
    [
        ("flood", 429, "rate_limit_exceeded", True),
        ("flood", 429, "queue_full", True),
        ("flood", 401, "invalid_api_key", False),
        ("flood", 503, "engine_dead", False),
        ("huge-body", 413, "body_too_large", True),
        ("huge-body", 400, "400", True),  # vLLM's own, of a prompt that is too long
        ("huge-body", 500, "internal_error", False),
        ("break-off", 413, "body_too_large", False),
        ("endless-block", 403, "code_not_allowed", False),
    ],
)
def test_only_what_the_hostile_tenant_deserves_is_a_good_answer(
    kind: str, status: int, code: str, is_good: bool
) -> None:
    assert ((status, code) in EXPECTED[kind]) == is_good


def event(text: str | None = None, **rest: Any) -> bytes:
    choices = [] if text is None else [{"index": 0, "text": text, "logprobs": None, "interventions": {}}]
    return f"data: {json.dumps({'id': 'one', 'choices': choices, **rest})}\n".encode()


def stream_of(*lines: tuple[float, bytes]) -> Stream:
    stream = Stream(began=10.0)
    for now, line in lines:
        stream.take(line, now)
    return stream


def usage(num_tokens: int) -> bytes:
    return event(usage={"prompt_tokens": 3, "completion_tokens": num_tokens, "total_tokens": num_tokens + 3})


DONE = b"data: [DONE]\r\n"
ERROR = b'data: {"error": {"message": "no", "code": "trace_failed"}}\n'


@pytest.mark.parametrize(
    ("lines", "failure"),
    [
        ([event(" a"), usage(1)], "the stream ended early"),
        ([event(" a"), b"event: error\n", ERROR, DONE], "trace_failed"),
        ([event(""), usage(0), DONE], "the stream had no token"),
    ],
)
def test_a_stream_that_is_not_whole_is_a_failure(lines: list[bytes], failure: str) -> None:
    assert stream_of(*((11.0, line) for line in lines)).failure() == failure


# What a run is judged by: ratios of its own numbers, and no number is a miss.

LENS = {"kind": "lens", "measure": "itl_p50", "of_kind": "plain"}
OF_CALM = {"measure": "itl_p95", "of_phase": "calm"}
TWO_PHASES = (row("plain", itl=10), row("plain", "flood", itl=30))


@pytest.mark.parametrize(
    ("rows", "threshold", "expected"),
    [
        (
            [
                *(row("plain", itl=10), row("lens", itl=14)),
                *(row("plain", "flood", itl=50), row("lens", "flood", itl=90)),
            ],
            {**LENS, "most": 1.5},
            [True, False],
        ),
        (TWO_PHASES, {**OF_CALM, "phase": "flood", "most": 3}, [True]),
        (TWO_PHASES, {**OF_CALM, "phase": "flood", "most": 2.9}, [False]),
        (TWO_PHASES, {**OF_CALM, "most": 3}, [True]),  # nothing is compared with itself
        # A number that is missing is a miss.
        ([row("plain")], {"measure": "itl_p50", "most": 1e9}, [False]),
        ([row("plain", num_requests=0)], {"measure": "error_share", "most": 0}, [False]),
        ([row("plain"), row("lens", itl=1)], {**LENS, "most": 9}, [False]),
        # What a run does not have is not for it.
        ([row("plain", itl=1)], {"measure": "itl_p50", "kind": "lens", "most": 0}, []),
        ([row("plain", itl=1)], {"measure": "itl_p50", "phase": "flood", "most": 0}, []),
        ([row("plain", itl=1)], {"measure": "itl_p50", "of_kind": "lens", "most": 0}, []),
        # The polite are all but the hostile tenant.
        (
            [row("plain"), row("flood", error_share=1.0)],
            {"kind": "*polite", "measure": "error_share", "most": 0},
            [True],
        ),
        (
            [row("plain"), row("flood", error_share=1.0)],
            {"measure": "error_share", "most": 0},
            [True, False],
        ),
        ([row("plain")], {"measure": "tokens_per_s", "least": 5.1}, [False]),
    ],
)
def test_a_threshold_is_kept_or_missed(
    rows: list[SummaryRow], threshold: dict[str, Any], expected: list[bool]
) -> None:
    assert [one.is_kept for one in judged(summary(*rows), [Threshold(**threshold)]).verdicts] == expected


def test_a_run_is_kept_if_all_of_it_is_and_no_user_crashed() -> None:
    wanted = [Threshold(measure="error_share", most=0)]
    assert judged(summary(row("plain")), wanted).is_kept
    assert not judged(summary(row("plain", error_share=0.1)), wanted).is_kept
    assert not judged(summary(row("plain"), crashes=["KeyError"]), wanted).is_kept


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('measure = "ttft"\nmost = 1', "must be one of error_share.*got 'ttft'"),
        ('measure = "ttft_p50"\nmost = 1\nkind = "plian"', r"`kind` .*\*polite.*got 'plian'"),
        ('measure = "ttft_p50"\nmost = 1\nphase = "warm-up"', "`phase` .*flood.*got 'warm-up'"),
        ('measure = "ttft_p50"\nmost = 1\nof_kind = "*"', r"`of_kind` .*plain.*got '\*'"),
        ('measure = "ttft_p50"\nmost = 1\nof_phase = "befor"', "`of_phase` .*got 'befor'"),
        ('measure = "ttft_p50"', "needs `most` or `least`"),
        ('measure = "ttft_p50"\nmost = 1\nscenario = "x"', "unknown field `scenario`"),
        ("[threshold", "cannot be read"),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_what_is_wrong(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "thresholds.toml"
    file.write_text(f"[[threshold]]\n{line}", encoding="utf-8")
    with pytest.raises(ThresholdError, match=message):
        read(file)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_projects_own_file_judges_every_phase_of_a_mixed_run(shape: str) -> None:
    kinds = ("plain", "steered-same", "steered-different", "lens", "capture")
    phases = [phase.name for phase in phases_of(shape, has_hostile=True) if phase.is_counted]
    rows = [
        row(kind, phase, itl=10, ttft_ms=times(5), e2e_ms=times(90)) for kind in kinds for phase in phases
    ]
    verdicts = judged(summary(*rows), read(DEFAULT_FILE)).verdicts
    assert all(one.is_kept for one in verdicts)
    assert {one.rule.partition(":")[0] for one in verdicts} == {
        f"{kind}, {phase}" for kind in kinds for phase in phases
    }
    # What a hostile tenant or a spike does to neighbours is judged by the time before.
    judged_by_time = {one.rule.partition(" / ")[0] for one in verdicts if "that of plain" in one.rule}
    assert {f"plain, {phase}: ttft_p50" for phase in phases[1:]} <= judged_by_time


# The table of capacity.
