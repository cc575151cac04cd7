"""Random where-clauses name what their words say, and are refused where they can name nothing."""

from __future__ import annotations

import dataclasses
import itertools
import random

import numpy as np
import pytest
import torch

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.operations import Where
from nnsight_engine.plans.compile.scope import CompileScope, MatchedPositions, compile_where
from nnsight_engine.plans.request_plan import AnswerMarkers, Part, Parts, PlannedAnswer, WhereRule
from nnsight_engine.plans.step.token_masks import AnswerTracker
from nnsight_engine.plans.where import evaluate, generated_is_constant, last_position
from tests.e2e.fuzz import wording
from tests.e2e.fuzz.clauses import Clauses
from tests.e2e.fuzz.world import Json
from tests.fakes.model_specs import tiny_spec
from tests.unit.plans.toy_engine import WORLD, encode

VOCABULARY = list(range(1, 30))
SPEC = tiny_spec(vocab_size=50)


def random_markers(pick: random.Random) -> AnswerMarkers:
    begun_by = {token: pick.randint(1, 3) for token in pick.sample(VOCABULARY, pick.randint(0, 8))}
    ends = frozenset(pick.sample(VOCABULARY, 2)) - begun_by.keys()
    return AnswerMarkers(begun_by, pick.randint(1, 3), ends)


def compiled_or_refused(clause: Json, scope: CompileScope) -> MatchedPositions | ErrorCode:
    try:
        return compile_where(Where.model_validate(clause), scope, "where")
    except ApiError as error:
        return error.code


@pytest.mark.parametrize("seed", range(8))
def test_a_clause_names_what_its_words_say_whatever_the_chunks(seed: int) -> None:
    pick = random.Random(seed)
    for _ in range(300):
        markers = random_markers(pick)
        ids, max_tokens = pick.choices(VOCABULARY, k=pick.randint(2, 20)), pick.choice([1, 2, 5, 12])
        world = dataclasses.replace(WORLD, markers=markers, vocab=VOCABULARY)
        clause = Clauses(world, pick).where({"ids": ids, "max_tokens": max_tokens})
        scope = CompileScope(SPEC, ids, max_tokens, lambda text: encode(text)[0], markers)
        matched = compiled_or_refused(clause, scope)
        if matched in {ErrorCode.EMPTY_WHERE, ErrorCode.POSITION_OUT_OF_RANGE}:
            continue
        fed = [*ids, *pick.choices(VOCABULARY, k=max_tokens - 1)]
        # Only what cannot act may be called contradictory; generated tokens are not known yet.
        can_name = wording.may_name_one(clause, ids, len(fed), encode, markers)
        assert can_name == (matched is not ErrorCode.CONTRADICTORY_WHERE), clause
        if isinstance(matched, MatchedPositions):
            check_rule(matched, clause, fed, len(ids), markers, pick)
            check_tracker(scope.answer, fed, len(ids), pick)


def check_rule(
    matched: MatchedPositions,
    clause: Json,
    fed: list[int],
    prompt_len: int,
    markers: AnswerMarkers,
    pick: random.Random,
) -> None:
    """See that the rule names in any chunks what the clause says, and what is said of it beforehand."""
    part_of = wording.answer_parts(fed, prompt_len, markers)
    expected = [
        position
        for position, token in enumerate(fed)
        if wording.names(clause, position, token, prompt_len, encode, part_of[position])
    ]
    parts = markers.plan(np.asarray(fed[:prompt_len])).parts(np.asarray(fed), prompt_len)
    assert matched.num_prompt == sum(position < prompt_len for position in expected)
    assert positions_named(matched.rule, fed, prompt_len, random_spans(len(fed), pick), parts) == expected
    last = last_position(matched.rule, prompt_len)
    assert last is None or max(expected, default=-1) <= last
    for first in range(prompt_len, len(fed)):
        constant = generated_is_constant(matched.rule, prompt_len, first)
        assert constant is None or all((p in expected) is constant for p in range(first, len(fed)))


def random_spans(num_positions: int, pick: random.Random) -> list[tuple[int, int]]:
    cuts = sorted(pick.sample(range(1, num_positions), min(pick.randint(0, 4), num_positions - 1)))
    return list(itertools.pairwise([0, *cuts, num_positions]))


def check_tracker(answer: PlannedAnswer, fed: list[int], prompt_len: int, pick: random.Random) -> None:
    """See that a worker has the same parts, which knows all tokens in some steps and plans some again."""
    parts = answer.parts(np.asarray(fed), prompt_len)
    spans = random_spans(len(fed), pick)
    num_first = pick.randint(prompt_len, len(fed))
    known = [pick.choice([num_first, len(fed)]) for _ in spans]
    again = pick.randrange(len(spans))
    tracker = AnswerTracker(answer, prompt_len)
    for index in [*range(again + 1), *range(again, len(spans))]:
        (start, stop), num_known = spans[index], known[index]
        ids = torch.tensor(fed[start:stop], dtype=torch.int32)
        rows = tracker.rows(start, stop - start, np.asarray(fed[:num_known], np.int32), ids)
        assert rows.known.tolist() == parts[start : min(stop, num_known)].tolist()
        if rows.rows is not None:
            on_device = rows.rows.numpy().copy()
            on_device[: max(prompt_len - 1 - start, 0)] = Part.NONE  # positions decide there
            assert on_device.tolist() == parts[start:stop].tolist()


def positions_named(
    rule: WhereRule, token_ids: list[int], prompt_len: int, spans: list[tuple[int, int]], parts: Parts
) -> list[int]:
    found: list[int] = []
    for start, stop in spans:
        positions = np.arange(start, stop, dtype=np.int64)
        ids = np.asarray(token_ids[start:stop], np.int32)
        found += positions[evaluate(rule, positions, ids, prompt_len, parts[start:stop])].tolist()
    return found


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
