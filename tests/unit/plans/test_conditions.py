"""Random conditions, scores and features on a toy model, in random steps, against a plain computation.

The computation goes through one position after the other, and in it through one tap after the other.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pytest
import torch

from api_schemas.conditions import NamedDetector
from api_schemas.detectors import DetectorUsed
from api_schemas.errors import ApiError
from nnsight_engine.core.detector import Detector
from nnsight_engine.features.config import Architecture
from nnsight_engine.plans.collect.results import (
    CollectedCapture,
    CollectedFeatures,
    CollectedMarks,
    CollectedResults,
    CollectedScores,
)
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
from tests.e2e.fuzz import wording
from tests.e2e.fuzz.clauses import Clauses
from tests.unit.plans import compiling
from tests.unit.plans.dictionaries import NUM_FEATURES, Known, named_dictionary, some_dictionary
from tests.unit.plans.toy_engine import (
    LAYERS,
    MARKERS,
    SPEC,
    VOCABULARY,
    WIDTH,
    WORLD,
    Life,
    ToyEngine,
    ToyModel,
    encode,
)

Json = dict[str, Any]
MODEL: Final = ToyModel(torch.float32, torch.float32)
POINTS: Final = [f"layers.{layer}.output" for layer in range(LAYERS)]
EVERYTHING: Final[Json] = {"op": "capture", "at": POINTS[-1], "name": "all"}


class Place(NamedTuple):
    """A point that is read for a score."""

    point: str


class FeatureScores:
    """The activations of a feature, read as the scores of a detector are."""

    def __init__(self, known: Known, feature: int) -> None:
        self.parts = (Place(known.stored.at),)
        self._known, self._feature = known, feature

    def scores(self, values: dict[str, Array]) -> list[float]:
        (rows,) = values.values()
        return [float(self._known.plain.encode(rows[0].astype(np.float64))[self._feature])]


class RandomCase:
    """A random request: its prompt and its operations, which name detectors of its own and dictionaries."""

    def __init__(self, rng: random.Random, known: dict[str, Known]) -> None:
        self.known = known
        self.ids = [rng.randrange(1, VOCABULARY) for _ in range(rng.randint(2, 12))]
        self.max_tokens = rng.randint(2, 24)
        self.readers: dict[str, Any] = {}
        self._clauses = Clauses(WORLD, rng)
        self.raw = [self._operation(rng) for _ in range(rng.randint(1, 4))]
        for index, op in enumerate(self.raw):
            op["name"] = f"op {index}"
        self.raw.append(EVERYTHING)

    def _operation(self, rng: random.Random) -> Json:
        kind = rng.choice(["steer", "steer", "ablate", "flag", "detect", "features", "feature", "feature"])
        op: Json = {"op": kind}
        if rng.random() < 0.6:
            where = self._clauses.where({"ids": self.ids, "max_tokens": self.max_tokens})
            op["where"] = rng.choice([where, {"phase": "generated"}, {}])
        if kind == "detect":
            return op | {"detector": self._detector(rng)}
        if kind in {"steer", "ablate"}:
            op["at"] = rng.choice([rng.choice(POINTS), "layers.2:4.output", "embed.output"])
        if kind == "steer":
            mode = rng.choice(["add", "norm_match", "replace", "clamp"])
            op |= {"vector": weights(rng, WIDTH).tolist(), "mode": mode, "scale": rng.uniform(0.5, 2)}
        if kind in {"features", "feature"}:
            op["dictionary"] = rng.choice(list(self.known))
            chosen = rng.sample(range(NUM_FEATURES), rng.randint(1, 4))
            if kind == "feature":
                op["changes"] = [_change(rng, one) for one in chosen]
            else:
                op |= rng.choice([{"features": chosen}, {"top_k": rng.randint(1, NUM_FEATURES)}])
        if kind == "flag" or (kind != "features" and rng.random() < 0.8):
            op["when"] = random_condition(rng, POINTS, WIDTH, lambda: self._score(rng))
        return op

    def _detector(self, rng: random.Random) -> str:
        name = f"detector {len(self.readers)}"
        self.readers[name] = random_detector(rng, POINTS, WIDTH)
        return name

    def _score(self, rng: random.Random) -> str:
        """Return the name of a new detector, or of the activations of a feature."""
        if rng.random() < 0.5:
            return self._detector(rng)
        dictionary, feature = rng.choice(list(self.known)), rng.randrange(NUM_FEATURES)
        self.readers[f"{dictionary} {feature}"] = FeatureScores(self.known[dictionary], feature)
        return f"{dictionary} {feature}"

    def resolved(self, value: Any) -> Any:
        """Return a part of an operation with its names resolved, as the server does."""
        if isinstance(value, list):
            return [self.resolved(one) for one in value]
        if not isinstance(value, dict):
            return value
        found = {key: self.resolved(one) for key, one in value.items()}
        if "dictionary" in value:
            found["dictionary"] = named_dictionary(value["dictionary"], self.known[value["dictionary"]])
        reader = self.readers.get(value.get("detector", ""))
        if isinstance(reader, Detector):
            name = value["detector"]
            found["detector"] = NamedDetector.of(DetectorUsed(name=name, version=1, id=name), reader)
        elif reader is not None:
            dictionary, feature = found.pop("detector").split()
            named = named_dictionary(dictionary, self.known[dictionary])
            found |= {"dictionary": named, "feature": int(feature)}
        return found

    def compiled(self) -> CompiledRequest | None:
        """Return the compiled request; None if a clause names nothing, or a condition reads too late."""
        try:
            return compiling.compiled(
                *map(self.resolved, self.raw),
                spec=SPEC,
                prompt=self.ids,
                max_tokens=self.max_tokens,
                token_of=lambda text: encode(text)[0],
                markers=MARKERS,
            )
        except ApiError as error:
            if error.param is not None and ".where" in error.param:
                return None
            if "decides for the next position" in error.message:
                return None
            raise


def _change(rng: random.Random, feature: int) -> Json:
    change: Json = {"feature": feature, "mode": rng.choice(["set", "add", "scale", "ablate"])}
    return change if change["mode"] == "ablate" else change | {"value": rng.uniform(-1, 2)}


class Expected:
    """What a request gives.

    Attributes:
        hidden: The output of the last layer, ``[tokens, width]``.
        found: Of each operation, what it gives at each position where it acts.
    """

    def __init__(self, case: RandomCase, tokens: list[int]) -> None:
        self._case, self._tokens = case, tokens
        self._parts = wording.answer_parts(tokens, len(case.ids), MARKERS)
        self._tests = {
            id(raw): PlayedTest(raw, case.readers, len(case.ids))
            for op in case.raw
            for raw in (inner_tests(op["when"]) if "when" in op else ())
        }
        self.found: list[dict[int, Any]] = [{} for _ in case.raw]
        self.hidden = np.stack([self._position(position) for position in range(len(tokens))])

    def _position(self, position: int) -> Array:
        x: Array = MODEL.embedding[self._tokens[position]].numpy()
        inputs: dict[int, Array] = {}
        seen: dict[tuple[int, int], dict[str, Array]] = {}
        for tap in range(LAYERS + 1):
            x = x if tap == 0 else _layer(tap - 1, x)
            for index, op in enumerate(self._case.raw):
                is_named = self._is_named(op, position)
                for reader in self._readers(op):
                    score = _read(reader, x, tap, seen.setdefault((index, id(reader)), {}))
                    if op["op"] == "detect" and score is not None and is_named:
                        self.found[index][position] = score
                if "dictionary" in op and tap == self._known(op).taps[0]:
                    inputs[index] = x
                    if op["op"] == "features" and is_named:
                        self.found[index][position] = self._known(op).plain.encode(x.astype(np.float64))
                if tap in self._taps(op) and is_named and self._acts(op, position):
                    self.found[index][position] = True
                    x = self._written(op, x, inputs.get(index, x))
        self._mark(position)
        return x

    def _mark(self, position: int) -> None:
        states = {key: test.states[position] for key, test in self._tests.items()}
        for index, op in enumerate(self._case.raw):
            if op["op"] == "flag" and self._is_named(op, position) and truth(op["when"], states):
                self.found[index][position] = True

    def _known(self, op: Json) -> Known:
        return self._case.known[op["dictionary"]]

    def _taps(self, op: Json) -> list[int]:
        """Return the taps at which an operation writes."""
        if op["op"] == "feature":
            return [self._known(op).taps[1]]
        if op["op"] not in {"steer", "ablate"}:
            return []
        at = op["at"]
        return [0] if at == "embed.output" else [3, 4] if ":" in at else [int(at.split(".")[1]) + 1]

    def _is_named(self, op: Json, position: int) -> bool:
        token, part = self._tokens[position], self._parts[position]
        return wording.names(op.get("where", {}), position, token, len(self._case.ids), encode, part)

    def _readers(self, op: Json) -> Iterator[Any]:
        if op["op"] == "detect":
            yield self._case.readers[op["detector"]]
        elif "when" in op:
            yield from (self._tests[id(raw)] for raw in inner_tests(op["when"]))

    def _acts(self, op: Json, position: int) -> bool:
        if "when" not in op:
            return True
        first, states = min(self._taps(op)), {}
        for raw in inner_tests(op["when"]):
            test = self._tests[id(raw)]
            # What is read behind the write decides for the next position.
            at = position - (test.last_layer + 1 > first)
            states[id(raw)] = at >= 0 and test.states[at]
        return truth(op["when"], states)

    def _written(self, op: Json, x: Array, read: Array) -> Array:
        if op["op"] == "ablate":
            return np.zeros_like(x)
        if op["op"] == "feature":
            return self._changed(op, read, x)
        v, s = np.asarray(op["vector"], np.float32), op["scale"]
        unit = v / np.linalg.norm(v)
        changed = {
            "add": x + s * v,
            "norm_match": x + s * np.linalg.norm(x) * unit,
            "replace": s * v,
            "clamp": x + (s - x @ unit) * unit,
        }[op["mode"]]
        return np.asarray(changed, np.float32)

    def _changed(self, op: Json, read: Array, x: Array) -> Array:
        plain, wide = self._known(op).plain, read.astype(np.float64)
        old, moved = plain.encode(wide), x.astype(np.float64)
        for change in op["changes"]:
            a, v = old[change["feature"]], change.get("value", 0.0)
            new = {"set": v, "add": a + v, "scale": a * v, "ablate": 0.0}[change["mode"]]
            moved = moved + (new - a) * plain.direction(change["feature"], wide)
        return moved.astype(np.float32)


def _layer(number: int, x: Array) -> Array:
    def unchanged(_: str, value: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        return value if residual is None else value + residual

    row: Array = MODEL.layer(number, torch.from_numpy(x)[None], unchanged)[0].numpy()
    return row


def _read(reader: Any, x: Array, tap: int, seen: dict[str, Array]) -> float | None:
    """Read a tap for a test or a detector; return the detector's score, once it is complete."""
    parts = (reader.detector if isinstance(reader, PlayedTest) else reader).parts
    now = {part.point: x[None] for part in parts if int(part.point.split(".")[1]) + 1 == tap}
    seen |= now
    if not now or len(seen) < len(parts):
        return None
    if isinstance(reader, PlayedTest):
        reader.add(seen)
        return None
    return float(reader.scores(seen)[0])


@pytest.mark.parametrize("seed", range(32))
def test_conditions_and_features_are_those_of_a_plain_computation(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    architectures = [list(Architecture)[seed % len(Architecture)], rng.choice(list(Architecture))]
    known = {f"d{i}": some_dictionary(9 * seed + i, tmp_path, one) for i, one in enumerate(architectures)}
    cases: dict[str, RandomCase] = {}
    lives: dict[str, Life] = {}
    while len(cases) < 4:
        case = RandomCase(rng, known)
        plan = case.compiled()
        if plan is not None:
            name = f"r{len(cases)}"
            cases[name], lives[name] = case, Life([*case.ids], len(case.ids), case.max_tokens, plan)
    engine = ToyEngine(rng)
    engine.run(lives)
    for name, case in cases.items():
        check(case, engine.collected(name, case.raw), Expected(case, lives[name].tokens[:-1]))
    assert not any(engine.held().values())


def check(case: RandomCase, collected: CollectedResults, expected: Expected) -> None:
    results = {result.name: result for result in collected.results}
    for index, op in enumerate(case.raw):
        wanted = expected.found[index]
        match results.get(op["name"]):
            case CollectedScores() as result:
                assert result.positions == sorted(wanted)
                scores = [wanted[position] for position in result.positions]
                np.testing.assert_allclose(result.scores, scores, rtol=1e-3, atol=1e-3)
            case CollectedMarks() as result:
                assert result.positions == sorted(wanted)
            case CollectedFeatures() as result:
                check_features(op, result, wanted)
            case CollectedCapture() as result:
                rows = np.frombuffer(result.points[op["at"]].data, np.float32).reshape(-1, WIDTH)
                np.testing.assert_allclose(rows, expected.hidden, rtol=1e-3, atol=1e-3)
            case found:
                assert found is None
                assert op["op"] in {"steer", "ablate", "feature"} or not wanted
                assert collected.applied[index].positions == sorted(wanted)


def check_features(op: Json, result: CollectedFeatures, expected: dict[int, Array]) -> None:
    assert result.positions == sorted(expected)
    for position, row in zip(result.positions, result.rows(), strict=True):
        activations = expected[position]
        if "features" in op:
            assert [feature for feature, _ in row] == op["features"]
        else:
            strongest = sorted(activations[activations > 0], reverse=True)[: op["top_k"]]
            np.testing.assert_allclose([value for _, value in row], strongest, rtol=1e-3, atol=1e-3)
        for feature, value in row:
            assert value == pytest.approx(activations[feature], rel=1e-3, abs=1e-3)
