"""The operations on features, and tests of features: their syntax, bounds, and what they name."""

from __future__ import annotations

from typing import Any

import pytest

from api_schemas.dictionaries import DictionaryUsed, NamedDictionary
from api_schemas.errors import ApiError, ErrorCode
from api_schemas.interventions import parse_interventions
from api_schemas.operation_names import (
    condition_tests,
    dictionaries_used,
    features_named,
    points_of_names,
)
from api_schemas.operations import Feature, Features, Flag, Steer
from nnsight_engine.features.config import Architecture, DictionaryConfig, StoredDictionary

READ = {"op": "features", "dictionary": "sae"}
SET = {"feature": 7, "value": 1.5}
WRITE = {"op": "feature", "dictionary": "sae", "changes": [SET]}
TEST = {"dictionary": "sae", "feature": 7}
STEER = {"op": "steer", "at": "layers.3.output"}


def flag(**test: Any) -> dict[str, Any]:
    return {"op": "flag", "when": TEST | test}


def named(name: str, output_at: str = "layers.3.output") -> NamedDictionary:
    config = DictionaryConfig(Architecture.STANDARD, 8, 16, 8)
    content = StoredDictionary(config, "layers.3.output", output_at, "0" * 64, "/nowhere", "float32")
    return NamedDictionary.of(DictionaryUsed(name=name, version=2, id=f"dict_{name}"), content)


def test_the_fields_of_reads() -> None:
    several = [READ, READ | {"top_k": 3}, READ | {"features": [0, "cats", 2**20]}]
    plain, top, chosen = parse_interventions(several)
    assert isinstance(plain, Features)
    assert isinstance(top, Features)
    assert isinstance(chosen, Features)
    assert (plain.dictionary.name, plain.dictionary.id) == ("sae", None)
    assert (top.top_k, top.features) == (3, None)
    assert (chosen.top_k, chosen.features) == (None, [0, "cats", 2**20])
    assert features_named(chosen) == {"features.0": 0, "features.1": "cats", "features.2": 2**20}


def test_the_fields_of_changes() -> None:
    modes: list[dict[str, Any]] = [
        SET,
        {"feature": "cats", "mode": "add", "value": -2},
        {"feature": 0, "mode": "scale", "value": 0},
        {"feature": "dogs", "mode": "ablate"},
    ]
    when = {"any": [TEST, {"not": TEST | {"feature": "cats", "below": 2}}]}
    raw = WRITE | {"dictionary": {"name": "sae@2", "id": "dict_1"}, "changes": modes, "when": when}
    (op,) = parse_interventions([raw])
    assert isinstance(op, Feature)
    assert (op.dictionary.name, op.dictionary.id) == ("sae@2", "dict_1")
    assert [(one.feature, one.mode, one.value) for one in op.changes] == [
        (7, "set", 1.5), ("cats", "add", -2.0), (0, "scale", 0.0), ("dogs", "ablate", None),
    ]  # fmt: skip
    assert [(test.feature, test.above, test.below) for test in condition_tests(op).values()] == [
        (7, None, None), ("cats", None, 2.0),
    ]  # fmt: skip
    assert features_named(op) == {
        "changes.0.feature": 7,
        "changes.1.feature": "cats",
        "changes.2.feature": 0,
        "changes.3.feature": "dogs",
        "when.any.0.feature": 7,
        "when.any.1.not.feature": "cats",
    }


@pytest.mark.parametrize("raw", [READ, READ | {"features": ["cats"]}, WRITE, flag(above=-1.0)])
def test_an_operation_that_was_read_can_be_sent_again(raw: dict[str, Any]) -> None:
    (op,) = parse_interventions([raw])
    assert parse_interventions([op.model_dump(mode="json", by_alias=True)]) == (op,)


@pytest.mark.parametrize(
    ("raw", "code", "param"),
    [
        ({"op": "features"}, ErrorCode.INVALID_SHAPE, "dictionary"),
        (READ | {"dictionary": 3}, ErrorCode.INVALID_SHAPE, "dictionary"),
        (READ | {"dictionary": {"name": "sae", "version": 1}}, ErrorCode.INVALID_SHAPE, "dictionary.version"),
        (READ | {"dictionary": ""}, ErrorCode.INVALID_VALUE, "dictionary"),
        (READ | {"dictionary": {"name": "x" * 129}}, ErrorCode.INVALID_VALUE, "dictionary.name"),
        (READ | {"at": "layers.1.output"}, ErrorCode.INVALID_SHAPE, "at"),
        (READ | {"when": TEST}, ErrorCode.INVALID_SHAPE, "when"),
        (READ | {"top_k": 0}, ErrorCode.INVALID_VALUE, "top_k"),
        (READ | {"top_k": 101}, ErrorCode.INVALID_VALUE, "top_k"),
        (READ | {"top_k": True}, ErrorCode.INVALID_SHAPE, "top_k"),
        (READ | {"top_k": 1, "features": [1]}, ErrorCode.INVALID_VALUE, "top_k"),
        (READ | {"features": 7}, ErrorCode.INVALID_SHAPE, "features"),
        (READ | {"features": []}, ErrorCode.INVALID_VALUE, "features"),
        (READ | {"features": [1, 2.0]}, ErrorCode.INVALID_SHAPE, "features.1"),
        (READ | {"features": [1, True]}, ErrorCode.INVALID_SHAPE, "features.1"),
        (READ | {"features": [-1]}, ErrorCode.INVALID_VALUE, "features.0"),
        (READ | {"features": [""]}, ErrorCode.INVALID_VALUE, "features.0"),
        (READ | {"features": ["x" * 501]}, ErrorCode.INVALID_VALUE, "features.0"),
        (READ | {"features": ["\ud800"]}, ErrorCode.INVALID_VALUE, "features.0"),
        (READ | {"features": ["cats", 1, "cats"]}, ErrorCode.INVALID_VALUE, "features.2"),
        (READ | {"features": list(range(101))}, ErrorCode.INVALID_VALUE, "features"),
        (READ | {"features": [True] * 1_000_000}, ErrorCode.INVALID_VALUE, "features"),
        ({"op": "feature", "dictionary": "sae"}, ErrorCode.INVALID_SHAPE, "changes"),
        (WRITE | {"changes": []}, ErrorCode.INVALID_VALUE, "changes"),
        (WRITE | {"changes": [[7, 1]]}, ErrorCode.INVALID_SHAPE, "changes.0"),
        (WRITE | {"changes": [SET | {"feature": i} for i in range(65)]}, ErrorCode.INVALID_VALUE, "changes"),
        (WRITE | {"changes": [{}] * 1_000_000}, ErrorCode.INVALID_VALUE, "changes"),
        (WRITE | {"changes": [SET, {"value": 1}]}, ErrorCode.INVALID_SHAPE, "changes.1.feature"),
        (WRITE | {"changes": [SET, SET]}, ErrorCode.INVALID_VALUE, "changes.1.feature"),
        (WRITE | {"changes": [{"feature": 7}]}, ErrorCode.INVALID_SHAPE, "changes.0.value"),
        (WRITE | {"changes": [SET | {"mode": "ablate"}]}, ErrorCode.INVALID_SHAPE, "changes.0.value"),
        (WRITE | {"changes": [SET | {"mode": "double"}]}, ErrorCode.INVALID_SHAPE, "changes.0.mode"),
        (WRITE | {"changes": [SET | {"value": float("nan")}]}, ErrorCode.NOT_FINITE, "changes.0.value"),
        (WRITE | {"changes": [SET | {"value": "1"}]}, ErrorCode.INVALID_SHAPE, "changes.0.value"),
        (WRITE | {"changes": [SET | {"strength": 1}]}, ErrorCode.INVALID_SHAPE, "changes.0.strength"),
        (WRITE | {"when": {"dictionary": "sae"}}, ErrorCode.INVALID_VALUE, "when.feature"),
        (WRITE | {"when": {"all": [TEST, {"feature": 3}]}}, ErrorCode.INVALID_VALUE, "when.all.1.detector"),
        (WRITE | {"when": {"all": [TEST], "zz": 1}}, ErrorCode.INVALID_SHAPE, "when.zz"),
        (WRITE | {"when": {"any": [TEST], "zz": 1}}, ErrorCode.INVALID_SHAPE, "when.zz"),
        (WRITE | {"when": {"any": [{"not": TEST, "zz": 1}]}}, ErrorCode.INVALID_SHAPE, "when.any.0.zz"),
        (WRITE | {"when": {"all": [TEST], "any": [TEST]}}, ErrorCode.INVALID_SHAPE, "when.any"),
        (flag(zz=1), ErrorCode.INVALID_SHAPE, "when.zz"),
        (STEER | {"vector": {"name": "joy", "zz": 1}}, ErrorCode.INVALID_SHAPE, "vector.zz"),
        (flag(detector="refusal"), ErrorCode.INVALID_VALUE, "when.detector"),
        (flag(dictionary=None, detector="refusal"), ErrorCode.INVALID_VALUE, "when.dictionary"),
        (flag(above=1, below=0), ErrorCode.INVALID_VALUE, "when.above"),
        (flag(feature=-1), ErrorCode.INVALID_VALUE, "when.feature"),
        (flag(feature=1.5), ErrorCode.INVALID_SHAPE, "when.feature"),
    ],
)  # fmt: skip
def test_errors_name_their_field(raw: dict[str, Any], code: ErrorCode, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_interventions([raw])
    assert (caught.value.code, caught.value.param) == (code, f"interventions.0.{param}")
    assert len(caught.value.message) < 600


def test_what_names_stand_for() -> None:
    raw = {"op": "flag", "when": {"all": [TEST, TEST | {"dictionary": "other"}]}}
    read, write, mark, steer = parse_interventions(
        [READ, WRITE | {"when": TEST}, raw, {"op": "steer", "at": "logits", "vector": [1], "when": TEST}]
    )
    assert isinstance(read, Features)
    assert isinstance(write, Feature)
    assert isinstance(mark, Flag)
    assert isinstance(steer, Steer)
    assert [dictionaries_used(one) for one in (read, write, mark, steer)] == [{}] * 4
    assert points_of_names(read) == points_of_names(write) == points_of_names(mark) == []
    transcoder = named("deep", "layers.3.mlp.output")
    found = read.model_copy(update={"dictionary": transcoder})
    assert points_of_names(found) == ["layers.3.output"]
    changed = write.model_copy(update={"dictionary": transcoder})
    assert points_of_names(changed) == ["layers.3.output", "layers.3.mlp.output"]
    assert points_of_names(write.model_copy(update={"dictionary": named("sae")})) == ["layers.3.output"]
    tests = [
        test.model_copy(update={"dictionary": named(f"d{index}")})
        for index, test in enumerate(condition_tests(mark).values())
    ]
    flagged = mark.model_copy(update={"when": mark.when.model_copy(update={"all": tests})})
    assert points_of_names(flagged) == ["layers.3.output"] * 2
    assert {path: used.id for path, used in dictionaries_used(flagged).items()} == {
        "when.all.0.dictionary": "dict_d0",
        "when.all.1.dictionary": "dict_d1",
    }
