"""Where-clauses: from JSON to masks, against a slow reference that reads the JSON itself."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.where import Where
from nnsight_engine.plans.answer_parts import AnswerMarkers, Part, Parts
from nnsight_engine.plans.compile.scope import CompileScope
from nnsight_engine.plans.compile.where_clause import Named, compile_where
from nnsight_engine.plans.request_plan import WhereRule
from nnsight_engine.plans.step.answer_tracker import AnswerTracker
from nnsight_engine.plans.where import evaluate, generated_is_constant, last_position
from tests.e2e.fuzz import wording
from tests.e2e.fuzz.wording import PARTS, answer_parts
from tests.fakes.model_specs import tiny_spec

VOCABULARY = 6
SPEC = tiny_spec(vocab_size=VOCABULARY)


def token_of(text: str) -> int:
    """Take "t3" for token 3."""
    return int(text[1:])


def clause_names(
    clause: dict[str, Any], position: int, token: int, prompt_len: int, part: str | None
) -> bool:
    """Say whether the clause names the position, straight from what the JSON means."""
    given = {key: value for key, value in clause.items() if value is not None}
    if "exclude" in given:
        given["exclude"] = {key: value for key, value in given["exclude"].items() if value is not None}
    return wording.names(given, position, token, prompt_len, lambda text: [token_of(text)], part)


@st.composite
def clauses(draw: st.DrawFn, prompt_len: int, num_positions: int, *, nested: bool) -> dict[str, Any]:
    clause: dict[str, Any] = {}
    if draw(st.booleans()):
        clause["phase"] = draw(st.sampled_from(["prompt", "generated", "all"]))
    if draw(st.booleans()):
        position = st.integers(-prompt_len, num_positions - 1) | st.integers(-prompt_len - 1, num_positions)
        clause["positions"] = draw(st.lists(position, min_size=1, max_size=6) | st.none())
    if draw(st.booleans()):
        bound = st.integers(-prompt_len, num_positions - 1) | st.integers(-prompt_len - 1, num_positions + 3)
        clause["range"] = [draw(bound), draw(bound | st.none())]
    if draw(st.booleans()):
        token = st.integers(0, VOCABULARY - 1)
        # Not the whole vocabulary: admission does not look whether a list leaves no token.
        clause["tokens"] = draw(
            st.lists(token | token.map(lambda t: f"t{t}"), min_size=1, max_size=VOCABULARY - 1)
        )
    if draw(st.booleans()):
        clause["scope"] = draw(st.sampled_from(PARTS) | st.none())
    if nested and draw(st.booleans()):
        clause["exclude"] = draw(clauses(prompt_len, num_positions, nested=False))
    return clause


@st.composite
def markers_of_answers(draw: st.DrawFn) -> AnswerMarkers:
    token, part = st.integers(0, VOCABULARY - 1), st.integers(1, 3)
    begun_by = draw(st.dictionaries(token, part, max_size=3))
    ends = draw(st.frozensets(token.filter(lambda one: one not in begun_by), max_size=1))
    return AnswerMarkers(begun_by, draw(part), ends)


@st.composite
def requests(draw: st.DrawFn) -> tuple[dict[str, Any], list[int], int, int]:
    prompt_len = draw(st.integers(1, 12))
    max_tokens = draw(st.integers(1, 10))
    num_positions = prompt_len + max_tokens - 1
    tokens = st.integers(0, VOCABULARY - 1)
    token_ids = draw(st.lists(tokens, min_size=num_positions, max_size=num_positions))
    clause = draw(clauses(prompt_len, num_positions, nested=True))
    return clause, token_ids, prompt_len, max_tokens


@settings(max_examples=600, deadline=None)
@given(requests(), markers_of_answers(), st.data())
def test_a_clause_names_what_its_json_says_whatever_the_chunks(
    request_: tuple[dict[str, Any], list[int], int, int], markers: AnswerMarkers, data: st.DataObject
) -> None:
    clause, token_ids, prompt_len, max_tokens = request_
    num_positions = len(token_ids)
    part_of = answer_parts(token_ids, prompt_len, markers)
    expected = [
        position
        for position in range(num_positions)
        if clause_names(clause, position, token_ids[position], prompt_len, part_of[position])
    ]
    in_prompt = [position for position in expected if position < prompt_len]
    scope = CompileScope(SPEC, token_ids[:prompt_len], max_tokens, token_of, markers)
    named = compiled_or_refused(clause, scope)
    if isinstance(named, ApiError):
        if named.code is ErrorCode.CONTRADICTORY_WHERE:
            # Only what cannot act may be called contradictory; generated tokens are not known yet.
            assert not expected
            assert not may_generate_any(clause, prompt_len, num_positions)
        else:
            assert named.code in {ErrorCode.EMPTY_WHERE, ErrorCode.POSITION_OUT_OF_RANGE}
            assert is_out_of_place(clause, prompt_len, num_positions)
        return
    assert not is_out_of_place(clause, prompt_len, num_positions)
    assert named.num_prompt == len(in_prompt)
    assert in_prompt or may_generate_any(clause, prompt_len, num_positions)
    cuts = sorted(data.draw(st.sets(st.integers(0, num_positions), max_size=4)))
    spans = [one for one in itertools.pairwise([0, *cuts, num_positions]) if one[0] < one[1]]
    parts = scope.answer.parts(np.asarray(token_ids), prompt_len)
    assert positions_named(named.rule, token_ids, prompt_len, spans, parts) == expected
    # As a worker does it, which knows all tokens in some steps, or those up to some point, and plans some
    # steps again.
    num_first = data.draw(st.integers(prompt_len, num_positions))
    known = [data.draw(st.sampled_from([num_first, num_positions])) for _ in spans]
    again = data.draw(st.integers(0, len(spans) - 1))
    tracker = AnswerTracker(scope.answer, prompt_len)
    for index in [*range(again + 1), *range(again, len(spans))]:
        (start, stop), num_known = spans[index], known[index]
        ids = torch.tensor(token_ids[start:stop], dtype=torch.int32)
        rows = tracker.rows(start, stop - start, np.asarray(token_ids[:num_known], np.int32), ids)
        assert rows.known.tolist() == parts[start : min(stop, num_known)].tolist()
        if rows.rows is not None:
            on_device = rows.rows.numpy().copy()
            on_device[: max(prompt_len - 1 - start, 0)] = Part.NONE  # positions decide there
            assert on_device.tolist() == parts[start:stop].tolist()
    last = last_position(named.rule, prompt_len)
    assert last is None or max(expected, default=-1) <= last
    for first in range(prompt_len, num_positions):
        constant = generated_is_constant(named.rule, prompt_len, first)
        if constant is not None:
            assert all(
                clause_names(clause, position, token, prompt_len, part) is constant
                for position in range(first, num_positions)
                for token in range(VOCABULARY)
                for part in PARTS
            )


def compiled_or_refused(clause: dict[str, Any], scope: CompileScope) -> Named | ApiError:
    try:
        return compile_where(Where.model_validate(clause), scope, "where")
    except ApiError as error:
        return error


def may_generate_any(clause: dict[str, Any], prompt_len: int, num_positions: int) -> bool:
    """Say whether some token at some generated position would be named."""
    return any(
        clause_names(clause, position, token, prompt_len, part)
        for position in range(prompt_len, num_positions)
        for token in range(VOCABULARY)
        for part in PARTS
    )


def positions_named(
    rule: WhereRule, token_ids: list[int], prompt_len: int, spans: list[tuple[int, int]], parts: Parts
) -> list[int]:
    found: list[int] = []
    for start, stop in spans:
        positions = np.arange(start, stop, dtype=np.int64)
        ids = np.asarray(token_ids[start:stop], np.int32)
        found += positions[evaluate(rule, positions, ids, prompt_len, parts[start:stop])].tolist()
    return found


def is_out_of_place(clause: dict[str, Any], prompt_len: int, num_positions: int) -> bool:
    """Say whether a clause names positions that the request has not, or is empty as written."""
    positions, bounds = clause.get("positions"), clause.get("range")
    if positions is not None:
        top = prompt_len if clause.get("phase") == "prompt" else num_positions
        if not positions or any(p < -prompt_len or p >= top for p in positions):
            return True
    if clause.get("tokens") == []:
        return True
    if bounds is not None:
        if any(bound is not None and bound < -prompt_len for bound in bounds):
            return True
        start, stop = (b if b is None or b >= 0 else prompt_len + b for b in bounds)
        if start >= num_positions or (stop is not None and start >= stop):
            return True
    exclude = clause.get("exclude")
    return exclude is not None and is_out_of_place(exclude, prompt_len, num_positions)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (WhereRule(), True),
        (WhereRule(phase="generated"), True),
        (WhereRule(phase="prompt"), False),
        (WhereRule(positions=(0, 4)), False),
        (WhereRule(positions=(0, 12)), None),
        (WhereRule(start=10), True),
        (WhereRule(start=11), None),
        (WhereRule(stop=10), False),
        (WhereRule(stop=11), None),
        (WhereRule(positions=(12,), start=13), False),
        (WhereRule(start=14, stop=12), False),
        (WhereRule(tokens=(1,)), None),
        (WhereRule(part=Part.REASONING), None),
        (WhereRule(part=Part.REASONING, stop=10), False),
        (WhereRule(exclude=WhereRule(part=Part.TOOL_CALLS)), None),
        (WhereRule(phase="prompt", tokens=(1,)), False),
        (WhereRule(exclude=WhereRule(phase="prompt")), True),
        (WhereRule(exclude=WhereRule(phase="generated")), False),
        (WhereRule(exclude=WhereRule(tokens=(1,))), None),
        (WhereRule(tokens=(1,), exclude=WhereRule(start=3)), False),
    ],
)
def test_steady_answers_are_known_from_a_position_on(rule: WhereRule, expected: bool | None) -> None:
    assert generated_is_constant(rule, 8, 10) is expected
