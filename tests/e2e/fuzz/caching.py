"""Whose keys and values a request may have found in the prefix cache, as docs/correctness.md says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import takewhile

from tests.e2e.fuzz import wording
from tests.e2e.fuzz.player import Answer
from tests.e2e.fuzz.world import Json


def cache_faults(index: int, requests: Sequence[Json], answers: Sequence[Answer]) -> list[str]:
    """Return what is wrong with the number of tokens that a request had from the cache.

    A case begins with an empty cache, so a request has no more of it than a text with which it may share.
    """
    request, cached = requests[index], answers[index].cached
    allowed = max(
        (
            _num_shared(request["ids"], other, answer)
            for number, (other, answer) in enumerate(zip(requests, answers, strict=True))
            if _may_share(request, other) and (number != index or request["sampling"].get("n", 1) > 1)
        ),
        default=0,
    )
    if cached <= allowed:
        return []
    return [f"{cached} tokens came from the cache, and no request left it more than {allowed}"]


def _may_share(request: Json, other: Json) -> bool:
    """Return whether two requests might share a prefix: salts are equal, and both write or neither does.

    Which writes are equal is seen in the numbers.
    """
    if "trace" in request or "trace" in other:
        return False
    writes, others = (any(map(wording.is_write, r["interventions"])) for r in (request, other))
    return request.get("cache_salt") == other.get("cache_salt") and writes == others


def _num_shared(ids: list[int], other: Json, answer: Answer) -> float:
    """Return how many first tokens of a prompt another request has put into the cache at most."""
    shared = _num_equal(ids, other["ids"])
    if shared < len(other["ids"]):
        return shared
    if not answer.choices:
        return math.inf  # what it had generated before it ended is not known
    return max(_num_equal(ids, [*other["ids"], *choice.token_ids]) for choice in answer.choices)


def _num_equal(ids: list[int], others: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, others, strict=False)))
