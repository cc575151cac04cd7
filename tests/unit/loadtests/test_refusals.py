"""Which answers to the hostile tenant are good ones."""

from __future__ import annotations

import pytest

from loadtests.refusals import EXPECTED
from loadtests.run_spec import HOSTILE


def test_each_thing_that_the_hostile_tenant_does_has_its_own() -> None:
    assert set(EXPECTED) == set(HOSTILE)


@pytest.mark.parametrize(
    ("kind", "status", "code", "is_good"),
    [
        ("flood", 429, "rate_limit_exceeded", True),
        ("flood", 429, "queue_full", True),
        ("flood", 401, "invalid_api_key", False),
        ("flood", 404, "not_found", False),
        ("flood", 503, "engine_dead", False),
        ("huge-body", 413, "body_too_large", True),
        ("huge-body", 400, "400", True),  # vLLM's own, of a prompt that is too long
        ("huge-body", 400, "invalid_json", False),
        ("huge-body", 500, "internal_error", False),
        ("break-off", 413, "body_too_large", False),
        ("endless-block", 403, "code_not_allowed", False),
    ],
)
def test_only_what_the_request_deserves_is_a_good_answer(
    kind: str, status: int, code: str, is_good: bool
) -> None:
    assert ((status, code) in EXPECTED[kind]) == is_good
