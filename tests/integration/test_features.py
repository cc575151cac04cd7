"""Features of dictionaries in requests: names, labels, presets, streams, tenants."""

from __future__ import annotations

import json
from typing import Any, Final

import httpx
import pytest

from api_schemas.administration import Scope
from api_schemas.dictionaries import NamedDictionary
from api_schemas.interventions import parse_interventions
from api_schemas.operation_names import condition_tests
from api_schemas.operations import Feature, Features, Flag
from api_schemas.results import ChoiceInterventions, FeaturesResult
from app.catalog.names import MAX_DICTIONARIES, StoredNames
from tests.integration.conftest import ErrorCheck, Serve, Server
from tests.integration.dictionary_files import NUM_FEATURES
from tests.integration.tenants import Tenants
from tests.integration.test_dictionaries import make as made_of

LABELS: Final = {"0": "animals", "3": "cats", "5": "twice", "6": "twice"}
READ: Final[dict[str, Any]] = {"op": "features", "dictionary": "sae"}
WRITE: Final[dict[str, Any]] = {
    "op": "feature", "dictionary": "sae",
    "changes": [{"feature": "cats", "mode": "ablate"}, {"feature": 1, "value": 2}],
}  # fmt: skip
USER: Final = (Scope.INTERVENTIONS, Scope.COMPLETIONS)


async def make(server: Server, headers: Any = None, name: str = "sae", **fields: Any) -> dict[str, Any]:
    """Store a dictionary; ``labels`` is None for none."""
    labels = fields.pop("labels", LABELS)
    given = None if labels is None else json.dumps(labels).encode()
    return await made_of(server, labels=given, headers=headers, name=name, **fields)


async def resolved(server: Server, *raw: dict[str, Any], tenant: str = "") -> list[Any]:
    """Return operations as they are compiled."""
    context = server.context
    names = StoredNames(context.vectors, context.detectors, context.dictionaries, tenant)
    return list(await names.resolved(parse_interventions(list(raw))))


def used_by(one: dict[str, Any]) -> dict[str, Any]:
    return {name: one[name] for name in ("name", "version", "id")}


def found_in(answer: httpx.Response, choice: int = 0) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    interventions: dict[str, Any] = answer.json()["choices"][choice]["interventions"]
    return interventions


@pytest.mark.both_databases
async def test_names_become_ids_and_files(server: Server) -> None:
    made = await make(server)
    test = {"dictionary": "sae@1", "feature": "cats"}
    read, chosen, write, flag = await resolved(
        server,
        READ,
        READ | {"features": [7, "cats", "animals"], "name": "chosen"},
        WRITE | {"dictionary": {"name": "sae", "id": made["id"]}, "when": {"not": test}},
        {"op": "flag", "when": {"any": [test, test | {"feature": 2}]}},
    )
    assert isinstance(read, Features)
    assert isinstance(chosen, Features)
    assert isinstance(write, Feature)
    assert isinstance(flag, Flag)
    assert (read.name, read.features) == ("features_0", None)
    assert (chosen.name, chosen.features) == ("chosen", [7, 3, 0])
    assert isinstance(chosen.dictionary, NamedDictionary)
    assert chosen.dictionary.labels is not None
    assert chosen.dictionary.labels.num_bytes([7, 3, 0]) == len("animalscats")
    changes = [(one.feature, one.mode, one.value) for one in write.changes]
    assert changes == [(3, "ablate", None), (1, "set", 2)]
    tests = [*condition_tests(write).values(), *condition_tests(flag).values()]
    assert [test.feature for test in tests] == [3, 3, 2]
    named = [read.dictionary, chosen.dictionary, write.dictionary]
    for one in [*named, *(test.dictionary for test in tests)]:
        assert isinstance(one, NamedDictionary)
        assert one.used is not None
        assert one.labels is not None
        assert one.used.model_dump() == used_by(made)
        content = one.content
        assert (content.sha256, content.at, content.dtype) == (made["sha256"], "layers.2.output", "float32")
        assert content.config.num_features == NUM_FEATURES
        assert await one.labels.of([5, 4, 0]) == {5: "twice", 0: "animals"}


@pytest.mark.parametrize(
    ("operation", "code", "param", "message"),
    [
        (READ | {"dictionary": "none"}, "unknown_dictionary", "dictionary", "no dictionary 'none'"),
        (READ | {"dictionary": "sae@2"}, "unknown_dictionary", "dictionary", "'sae@2'"),
        (READ | {"dictionary": {"name": "sae", "id": "x"}}, "unknown_dictionary", "dictionary", "id 'x'"),
        (READ | {"features": [1, NUM_FEATURES]}, "unknown_feature", "features.1", "features 0 to 15"),
        (READ | {"features": ["dogs"]}, "unknown_feature", "features.0", "No feature"),
        (READ | {"features": [1, "twice"]}, "unknown_feature", "features.1", "5, 6. Name one by its id"),
        (READ | {"features": [3, "cats"]}, "invalid_value", "features.1", "named twice"),
        (
            WRITE | {"changes": [{"feature": 3, "value": 1}, {"feature": "cats", "value": 1}]},
            "invalid_value", "changes.1.feature", "named twice",
        ),
        (WRITE | {"dictionary": "none"}, "unknown_dictionary", "dictionary", "no dictionary"),
        (
            WRITE | {"when": {"all": [{"dictionary": "sae", "feature": "dogs"}]}},
            "unknown_feature", "when.all.0.feature", "No feature",
        ),
        (
            {"op": "flag", "when": {"dictionary": "none", "feature": 1}},
            "unknown_dictionary", "when.dictionary", "no dictionary",
        ),
    ],
)  # fmt: skip
async def test_names_without_a_meaning_are_refused(
    server: Server, error_of: ErrorCheck, operation: dict[str, Any], code: str, param: str, message: str
) -> None:
    await make(server)
    answer = await server.complete(interventions=[READ, operation])
    assert message in error_of(answer, 400, code)
    assert answer.json()["error"]["param"] == f"interventions.1.{param}"


async def test_answers_have_labels_and_say_which_dictionary_was_used(server: Server) -> None:
    first = await make(server)
    second = await make(server, labels=None)
    flag = {"op": "flag", "when": {"all": [{"dictionary": "sae@1", "feature": 1}]}}
    operations = [
        READ | {"dictionary": "sae@1", "top_k": 4},
        READ | {"features": [9, 3], "name": "chosen"},
        READ | {"dictionary": "sae@1", "features": ["cats", 9], "name": "labelled"},
        WRITE | {"dictionary": "sae@1"},
        flag,
    ]
    answer = await server.complete(prompt="a b c", max_tokens=1, interventions=operations)
    found = found_in(answer)
    top = found["results"]["features_0"]
    assert top["positions"] == [0, 1, 2]
    assert [[(one["id"], one["label"]) for one in row] for row in top["features"]] == [
        [(0, "animals"), (1, None), (2, None), (3, "cats")]
    ] * 3
    assert top["features"][1][0] == {"id": 0, "label": "animals", "activation": 2.0}
    chosen = [[(one["id"], one["label"]) for one in row] for row in found["results"]["chosen"]["features"]]
    assert chosen == [[(9, None), (3, None)]] * 3
    labelled = found["results"]["labelled"]["features"][0]
    assert [(one["id"], one["label"]) for one in labelled] == [(3, "cats"), (9, None)]
    used = [[used_by(first)], [used_by(second)], [used_by(first)], [used_by(first)], [used_by(first)]]
    assert [one["dictionaries"] for one in found["applied"]] == used
    assert [one["at"] for one in found["applied"]] == [["layers.2.output"]] * 5
    read = ChoiceInterventions.model_validate(found)
    assert isinstance(read.results["chosen"], FeaturesResult)


async def test_each_prompt_has_its_own_names_and_labels(server: Server) -> None:
    await make(server)
    await make(server, name="other", labels={"0": "plants"})
    operations = [
        READ | {"top_k": 1, "prompts": [1]},
        READ | {"dictionary": "other", "top_k": 1, "prompts": [0]},
        READ | {"top_k": 1},
    ]
    answer = await server.complete(prompt=["a", "b"], max_tokens=1, interventions=operations)
    labels = [
        {name: one["features"][0][0]["label"] for name, one in found_in(answer, choice)["results"].items()}
        for choice in (0, 1)
    ]
    assert labels == [
        {"features_1": "plants", "features_2": "animals"},
        {"features_0": "animals", "features_2": "animals"},
    ]


async def test_labels_count_against_the_limit_on_captures(serve: Serve, error_of: ErrorCheck) -> None:
    async with serve(max_capture_bytes_per_request=3 * 400) as server:
        await make(server, labels={"0": "é" * 200})
        body = {"prompt": "a b c", "max_tokens": 1, "interventions": [READ | {"top_k": 1}]}
        found = found_in(await server.complete(**body))
        assert len(found["results"]["features_0"]["features"]) == 3
        refused = await server.complete(**body | {"prompt": "a b c d"})
        assert "fewer features or positions" in error_of(refused, 400, "capture_too_large")


async def test_a_request_names_few_dictionaries(server: Server, error_of: ErrorCheck) -> None:
    for index in range(MAX_DICTIONARIES + 1):
        await make(server, name=f"sae{index}", labels=None)
    reads = [READ | {"dictionary": f"sae{index}"} for index in range(MAX_DICTIONARIES)]
    again = READ | {"dictionary": "sae0@1", "name": "again"}
    assert (await server.complete(interventions=[*reads, again])).status_code == 200
    one_more = {"op": "flag", "when": {"dictionary": f"sae{MAX_DICTIONARIES}", "feature": 1}}
    refused = await server.complete(interventions=[*reads, again, one_more])
    assert "16 different dictionaries" in error_of(refused, 400, "too_many_operations")
    assert refused.json()["error"]["param"] == f"interventions.{MAX_DICTIONARIES + 1}.when.dictionary"


@pytest.mark.both_databases
async def test_a_tenant_sees_the_labels_of_its_own_dictionary(tenants: Tenants, error_of: ErrorCheck) -> None:
    server = tenants.server
    acme, other = await tenants.headers("acme", *USER), await tenants.headers("other", *USER)
    operator = await tenants.headers("operator")

    async def ask(headers: dict[str, str], operation: dict[str, Any]) -> httpx.Response:
        body = {"model": "fake-model", "prompt": "a", "max_tokens": 1, "interventions": [operation]}
        return await tenants.send("POST", "/v1/completions", headers, json=body)

    await make(server, acme)
    # Both have one of the same weights and name, and see the labels of their own.
    await make(server, other, labels={"0": "plants"})
    read = READ | {"top_k": 1, "name": "r"}
    for headers, label in ((acme, "animals"), (other, "plants")):
        found = found_in(await ask(headers, read))
        assert found["results"]["r"]["features"][0][0]["label"] == label
    error_of(await ask(other, READ | {"features": ["cats"]}), 400, "unknown_feature")
    error_of(await ask(acme, READ | {"features": ["plants"]}), 400, "unknown_feature")
    shared = await make(server, operator, name="ours", shared="true")
    found = found_in(await ask(other, READ | {"dictionary": "ours", "features": ["cats"], "name": "r"}))
    assert found["applied"][0]["dictionaries"] == [used_by(shared)]
    assert found["results"]["r"]["features"][0] == [{"id": 3, "label": "cats", "activation": 1.0}]
