"""Random requests on a toy model, in random steps, are answered as the documentation says."""

from __future__ import annotations

import random
from typing import Any, Final

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from api_schemas.errors import ApiError, ErrorCode
from nnsight_engine.core import model_spec
from nnsight_engine.core.errors import InterventionError
from nnsight_engine.plans import work
from nnsight_engine.plans.collect.results import CollectedCapture, CollectedResults
from nnsight_engine.plans.request_plan import CompiledRequest
from tests.e2e.fuzz.cases import Author
from tests.e2e.fuzz.judge import Choice, Judge
from tests.e2e.fuzz.vectors import sent
from tests.unit.plans import compiling
from tests.unit.plans.toy_engine import MARKERS, WORLD, Life, ToyEngine, ToyTwin, encode

Json = dict[str, Any]
TWINS: Final = {
    dtype: ToyTwin(dtype, wider)
    for dtype, wider in ((torch.bfloat16, torch.float32), (torch.float32, torch.float64))
}
ROUNDED: Final = {dtype: ToyTwin(dtype, dtype) for dtype in TWINS}
REFUSED: Final = {
    ErrorCode.EMPTY_WHERE,
    ErrorCode.POSITION_OUT_OF_RANGE,
    ErrorCode.CONTRADICTORY_WHERE,
    ErrorCode.INVALID_VALUE,
}
"""Codes of clauses that name nothing, and of patches that name a position twice, see ``test_where``."""


def compiled(engine: ToyEngine, request: Json) -> CompiledRequest:
    return compiling.compiled(
        *map(sent, request["interventions"]),
        spec=engine.spec,
        prompt=request["ids"],
        max_tokens=request["max_tokens"],
        stream=request.get("stream", False),
        token_of=lambda text: encode(text)[0],
        markers=MARKERS,
    )


@pytest.mark.parametrize("dtype", TWINS, ids=str)
@pytest.mark.parametrize("seed", range(60))
def test_random_requests_give_what_a_plain_computation_gives(seed: int, dtype: torch.dtype) -> None:
    engine = ToyEngine(random.Random(seed), dtype)
    requests: dict[str, Json] = {}
    lives: dict[str, Life] = {}
    for index, request in enumerate(Author(WORLD, seed).case()):
        if "trace" in request:
            continue
        operations = request["interventions"]
        try:
            plan = compiled(engine, request) if operations else None
        except ApiError as error:
            if error.code not in REFUSED:
                raise
            continue
        name = f"r{index}"
        is_whole = any(op.get("method") == "mean" for op in operations)
        requests[name] = request | {"sampling": {}}
        ids = request["ids"]
        lives[name] = Life([*ids], len(ids), request["max_tokens"], plan, is_whole, request["arrives"] % 97)
    engine.run(lives)
    judge = Judge(TWINS[dtype], ROUNDED[dtype], engine.spec.dtype)
    faults = {}
    for name, request in requests.items():
        collected = failure = None
        try:
            if request["interventions"]:
                collected = engine.collected(name, request["interventions"])
                check_each_read_has_a_result(collected, request["interventions"])
        except InterventionError as error:
            failure = error
        faults[name] = judge.faults(request, Choice(lives[name].answer, [], collected, failure=failure))
    assert not {name: found for name, found in faults.items() if found}
    assert not any(engine.held().values())


def check_each_read_has_a_result(collected: CollectedResults, operations: list[Json]) -> None:
    """Also one that met no position."""
    assert [result.name for result in collected.results] == [op["name"] for op in operations if "name" in op]
    for result in collected.results:
        if isinstance(result, CollectedCapture) and not result.positions:
            assert all(tensor.shape[0] == len(tensor.data) == 0 for tensor in result.points.values())


class Regular(random.Random):
    """Steps of whole prompts, none of them twice."""

    def random(self) -> float:
        return 0.99


def multiply_adds(engine: ToyEngine, request: Json, plan: CompiledRequest | None) -> float:
    """Return those of all products of matrices in a request's steps, and its answer."""
    life = Life([*request["ids"]], len(request["ids"]), request["max_tokens"], plan)
    with FlopCounterMode(display=False) as counter:
        engine.run({"r": life})
    return int(counter.get_total_flops()) / 2


@pytest.mark.parametrize("seed", range(60))
def test_products_of_matrices_are_counted_as_work(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_spec, "_LEAST_WORK", 1)
    for name, value in (("_LEAST", 0), ("_PASS", 2), ("_LENS", 0), ("_TARGET", 0), ("_SORT", 0)):
        monkeypatch.setattr(work, name, value)
    for request in Author(WORLD, seed).case():
        operations = request.get("interventions")
        if "trace" in request or not operations:
            continue
        engine, bare = ToyEngine(Regular(seed)), ToyEngine(Regular(seed))
        try:
            plan = compiled(engine, request)
        except ApiError:
            continue
        added = multiply_adds(engine, request, plan) - multiply_adds(bare, request, None)
        num_positions = len(request["ids"]) + request["max_tokens"] - 1
        counted = work.WorkByPosition(plan.plan, request["ids"]).between(0, num_positions)
        assert added <= counted * engine.spec.forward_work, request
