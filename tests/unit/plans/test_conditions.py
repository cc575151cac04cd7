"""Random conditions on a toy model, in random steps, against a plain reference position by position."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest

from api_schemas.conditions import NamedDetector
from api_schemas.detectors import DetectorUsed
from nnsight_engine.core.detector import Detector
from nnsight_engine.plans.collect.results import CollectedMarks, CollectedScores
from nnsight_engine.plans.request_plan import CompiledRequest
from tests.condition_reference import (
    Array,
    PlayedTest,
    inner_tests,
    random_condition,
    random_detector,
    truth,
    weights,
)
from tests.unit.plans import compiling
from tests.unit.plans.played_engine import LAYERS, POINTS, SPEC, WIDTH, PlayedEngine, block

# Random requests.


class RandomCase:
    """A random request of a toy model: its prompt, its answer and its operations."""

    def __init__(self, rng: random.Random) -> None:
        self.prompt_len = rng.randint(2, 12)
        self.num_generated = rng.randint(1, 24)
        self.tokens = [rng.randrange(50) for _ in range(self.prompt_len + self.num_generated)]
        self.embedded = weights(rng, len(self.tokens), WIDTH)
        self.detectors: dict[str, Detector] = {}
        self.raw = [self._operation(rng) for _ in range(rng.randint(1, 4))]
        for index, op in enumerate(self.raw):
            op["name"] = f"op {index}"

    def _operation(self, rng: random.Random) -> dict[str, Any]:
        kind = rng.choice(["steer", "steer", "ablate", "flag", "detect"])
        if kind == "detect":
            return {"op": "detect", "detector": self._named(rng)}
        where: dict[str, Any] = rng.choice(
            [{}, {"phase": "generated"}, {"range": [1, None]}, {"tokens": list(range(0, 50, 2))}]
        )
        where = where if kind == "flag" or rng.random() < 0.6 else {"phase": "generated"}
        op: dict[str, Any] = {"op": kind, "where": where}
        if kind != "flag":
            op["at"] = rng.choice(
                [f"layers.{rng.randrange(LAYERS)}.output", "layers.2:4.output", "embed.output"]
            )
        if kind == "steer":
            mode = rng.choice(["add", "norm_match", "replace", "clamp"])
            op |= {"vector": weights(rng, WIDTH).tolist(), "mode": mode, "scale": rng.uniform(0.5, 2)}
        if kind == "flag" or rng.random() < 0.9:
            op["when"] = random_condition(rng, POINTS, WIDTH, lambda: self._named(rng))
        return op

    def _named(self, rng: random.Random) -> str:
        name = f"d{len(self.detectors)}"
        self.detectors[name] = random_detector(rng, POINTS, WIDTH)
        return name

    def resolved(self, value: Any) -> Any:
        """Return a part of an operation with its detectors' names resolved, as the server does."""
        if isinstance(value, dict):
            return {
                key: self.named(one) if key == "detector" else self.resolved(one)
                for key, one in value.items()
            }
        return [self.resolved(one) for one in value] if isinstance(value, list) else value

    def named(self, name: str) -> NamedDetector:
        return NamedDetector.of(DetectorUsed(name=name, version=1, id=name), self.detectors[name])

    def compiled(self) -> CompiledRequest | None:
        """Return the compiled request; None if a condition reads too late for the prompt."""
        ops = [self.resolved(one) for one in self.raw]
        prompt, max_tokens = self.tokens[: self.prompt_len], self.num_generated + 1
        try:
            return compiling.compiled(*ops, spec=SPEC, prompt=prompt, max_tokens=max_tokens)
        except Exception as error:
            if "decides for the next position" in str(error):
                return None
            raise


# The reference: one position after the other, and in it one tap after the other.


@dataclasses.dataclass
class Reference:
    """What a request gives, computed naively."""

    hidden: Array
    acted: dict[int, list[int]]
    scores: dict[int, list[float]]


def taps(op: dict[str, Any]) -> list[int]:
    at = op.get("at", "")
    if at == "embed.output":
        return [0]
    return [3, 4] if ":" in at else [int(at.split(".")[1]) + 1] if at else []


def named(op: dict[str, Any], position: int, case: RandomCase) -> bool:
    where = op.get("where", {})
    if where.get("phase") == "generated":
        return position >= case.prompt_len
    if "range" in where:
        return position >= 1
    return case.tokens[position] in where["tokens"] if "tokens" in where else True


def written(op: dict[str, Any], x: Array) -> Array:
    if op["op"] == "ablate":
        return np.zeros_like(x)
    v, s = np.asarray(op["vector"], np.float32), op["scale"]
    unit = v / np.linalg.norm(v)
    changed = {
        "add": x + s * v,
        "norm_match": x + s * np.linalg.norm(x) * unit,
        "replace": s * v,
        "clamp": x + (s - x @ unit) * unit,
    }[op["mode"]]
    return np.asarray(changed, np.float32)


def reference(case: RandomCase) -> Reference:
    tests = {
        id(raw): PlayedTest(raw, case.detectors, case.prompt_len)
        for op in case.raw
        if "when" in op
        for raw in inner_tests(op["when"])
    }
    acted: dict[int, list[int]] = {index: [] for index in range(len(case.raw))}
    scores: dict[int, list[float]] = {index: [] for index in range(len(case.raw))}
    hidden = []
    for position in range(len(case.tokens)):
        x = case.embedded[position]
        seen: dict[tuple[int, int], dict[str, Array]] = {}
        for tap in range(LAYERS + 1):
            x = x if tap == 0 else block(tap - 1, x)
            for index, op in enumerate(case.raw):
                for reader in _readers(op, tests, case):
                    scores[index] += _read(reader, x, tap, seen.setdefault((index, id(reader)), {}))
                if tap in taps(op) and named(op, position, case) and _acts(op, tests, position):
                    x = written(op, x)
                    if tap == min(taps(op)):
                        acted[index].append(position)
        for index, op in enumerate(case.raw):
            if op["op"] == "flag" and named(op, position, case):
                states = {key: test.states[position] for key, test in tests.items()}
                if truth(op["when"], states):
                    acted[index].append(position)
        hidden.append(x)
    return Reference(np.stack(hidden), acted, scores)


def _read(reader: PlayedTest | Detector, x: Array, tap: int, seen: dict[str, Array]) -> list[float]:
    """Read a tap for a test or a detector; return the detector's score, once it is complete."""
    parts = (reader.detector if isinstance(reader, PlayedTest) else reader).parts
    now = {part.point: x[None] for part in parts if int(part.point.split(".")[1]) + 1 == tap}
    seen |= now
    if not now or len(seen) < len(parts):
        return []
    if isinstance(reader, PlayedTest):
        reader.add(seen)
        return []
    return [float(reader.scores(seen)[0])]


def _acts(op: dict[str, Any], tests: dict[int, PlayedTest], position: int) -> bool:
    if "when" not in op:
        return True
    own = [tests[id(raw)] for raw in inner_tests(op["when"])]
    first = min(taps(op))
    return truth(op["when"], {id(one.raw): _state(one, one.last_layer + 1 > first, position) for one in own})


def _state(test: PlayedTest, is_next: bool, position: int) -> bool:
    if is_next:
        return position > 0 and test.states[position - 1]
    return test.states[position]


def _readers(op: dict[str, Any], tests: dict[int, PlayedTest], case: RandomCase) -> list[Any]:
    if op["op"] == "detect":
        return [case.detectors[op["detector"]]]
    return [tests[id(raw)] for raw in inner_tests(op["when"])] if "when" in op else []


@pytest.mark.parametrize("seed", range(16))
def test_conditions_hold_where_a_reference_says(seed: int) -> None:
    rng = random.Random(seed)
    cases: dict[str, RandomCase] = {}
    plans: dict[str, CompiledRequest] = {}
    while len(cases) < 4:
        case = RandomCase(rng)
        compiled = case.compiled()
        if compiled is not None:
            name = f"r{len(cases)}"
            cases[name], plans[name] = case, compiled
    engine = PlayedEngine(rng)
    active = {name: engine.register(name, compiled) for name, compiled in plans.items()}
    hidden = engine.run(cases, active)
    for name, case in cases.items():
        assert active[name].failure is None
        expected = reference(case)
        np.testing.assert_allclose(hidden[name], expected.hidden, rtol=1e-4, atol=1e-4)
        found = engine.collected(name, plans[name], case, [op["op"] for op in case.raw])
        results = {result.name: result for result in found.results}
        for index, op in enumerate(case.raw):
            result = results.get(op["name"])
            if op["op"] == "detect":
                assert isinstance(result, CollectedScores)
                assert result.positions == [*range(len(case.tokens))]
                np.testing.assert_allclose(result.scores, expected.scores[index], rtol=1e-4, atol=1e-4)
            elif op["op"] == "flag":
                assert isinstance(result, CollectedMarks)
                assert result.positions == expected.acted[index]
            else:
                assert found.applied[index].positions == expected.acted[index]
    for request in active.values():
        engine.registrar.forget(request)
    assert not len(engine.registrar.slots)
    assert not len(engine.registrar.bank)
