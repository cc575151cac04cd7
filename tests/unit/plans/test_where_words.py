"""Random where-clauses name what their words say, and are refused where they can name nothing."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.where import Where
from nnsight_engine.plans.answer_parts import AnswerMarkers
from nnsight_engine.plans.compile.scope import CompileScope
from nnsight_engine.plans.compile.where_clause import compile_where
from nnsight_engine.plans.request_plan import WhereRule
from nnsight_engine.plans.where import evaluate, generated_is_constant, last_position
from tests.e2e.fuzz import wording
from tests.e2e.fuzz.clauses import Clauses
from tests.e2e.fuzz.world import World
from tests.fakes.model_specs import tiny_spec

VOCABULARY = list(range(1, 40))
TEXTS = {token: f"t{token}" for token in VOCABULARY[:20]}
MARKERS = AnswerMarkers({3: 2, 7: 1, 11: 3, 12: 3, 20: 1}, 2, frozenset({5}))
WORLD = World(4, {}, {}, VOCABULARY, TEXTS, 30, 24, MARKERS)
SPEC = tiny_spec(vocab_size=40, max_model_len=4096)


def encode(text: str) -> list[int]:
    return [int(text.removeprefix("t"))]


def compiled(clause: dict[str, Any], ids: list[int], max_tokens: int) -> WhereRule | ErrorCode:
    try:
        scope = CompileScope(SPEC, ids, max_tokens, lambda text: encode(text)[0], MARKERS)
        return compile_where(Where.model_validate(clause), scope, "where").rule
    except ApiError as error:
        return error.code


@pytest.mark.parametrize("seed", range(4))
def test_random_clauses_name_what_their_words_say(seed: int) -> None:
    pick = random.Random(seed)
    clauses = Clauses(WORLD, pick)
    for _ in range(1000):
        ids, max_tokens = pick.choices(VOCABULARY, k=pick.randint(2, 30)), pick.choice([1, 2, 5, 24])
        clause = clauses.where({"ids": ids, "max_tokens": max_tokens})
        fed = [*ids, *pick.choices(VOCABULARY, k=max_tokens - 1)]
        rule = compiled(clause, ids, max_tokens)
        if rule in {ErrorCode.EMPTY_WHERE, ErrorCode.POSITION_OUT_OF_RANGE}:
            continue
        can_name = wording.may_name_one(clause, ids, len(fed), encode, MARKERS)
        assert can_name == (rule is not ErrorCode.CONTRADICTORY_WHERE), clause
        if isinstance(rule, WhereRule):
            parts = wording.answer_parts(fed, len(ids), MARKERS)
            wanted = [
                p
                for p, token in enumerate(fed)
                if wording.names(clause, p, token, len(ids), encode, parts[p])
            ]
            own = MARKERS.plan(np.asarray(ids)).parts(np.asarray(fed), len(ids))
            named = evaluate(rule, np.arange(len(fed)), np.asarray(fed), len(ids), own)
            assert np.flatnonzero(named).tolist() == wanted, clause
            assert_bounds(rule, wanted, len(ids), len(fed), pick.randint(0, len(fed)))


def assert_bounds(
    rule: WhereRule, wanted: list[int], prompt_len: int, num_positions: int, start: int
) -> None:
    constant = generated_is_constant(rule, prompt_len, start)
    rest = [position in wanted for position in range(max(start, prompt_len), num_positions)]
    assert constant is None or all(named == constant for named in rest), rule
    last = last_position(rule, prompt_len)
    assert last is None or max(wanted, default=-1) <= last, rule
