"""Names of vectors in operations: resolution, visibility, and the vector reported in the response."""

from __future__ import annotations

import json
from typing import Any

import pytest

from api_schemas.interventions import parse_interventions
from api_schemas.operation_names import tensors_of
from nnsight_engine.plans.compile.tensors import read_tensor
from tests.integration.conftest import ErrorCheck, Server
from tests.integration.test_vectors import make
from tests.integration.vector_files import ROWS

ROW = {layer: row.tolist() for layer, row in ROWS.items()}
JOY = {"name": "joy"}


def steer(vector: Any = JOY, at: Any = "layers.1.output", **rest: Any) -> dict[str, Any]:
    return {"op": "steer", "at": at, "vector": vector, **rest}


async def keys_of(server: Server, operation: dict[str, Any], tenant: str = "") -> str:
    """Return the hashes of an operation's tensors, by which plans know them."""
    operations = parse_interventions([operation])
    resolver = server.context.vectors.resolver(tenant)
    resolved = await resolver.resolved(operations[0], "interventions.0")
    return " ".join(read_tensor(tensor, "x").key() for tensor in tensors_of(resolved).values())


@pytest.mark.both_databases
async def test_a_name_is_the_numbers_that_it_stands_for(server: Server) -> None:
    await make(server)
    ways: list[tuple[dict[str, Any], Any]] = [
        (steer(), ROW[1]),
        (steer(at="layers.2.output"), ROW[2]),
        (steer(at="layers.-2.output"), ROW[2]),
        (steer(at="layers.1:3.output"), [ROW[1], ROW[2]]),
        (steer(at=["layers.2.output", "layers.1.output"]), [ROW[2], ROW[1]]),
        (steer({"name": "joy@1"}), ROW[1]),
        (steer({"name": "joy", "layer": 2}, at="layers.*.output"), ROW[2]),
        (steer({"name": "joy", "layer": -3}, at="layers.0.input"), ROW[1]),
    ]
    for operation, numbers in ways:
        assert await keys_of(server, operation) == await keys_of(server, {**operation, "vector": numbers})
    ablate = {"op": "ablate", "at": "layers.2.output", "method": "vector", "vector": JOY}
    assert await keys_of(server, ablate) == await keys_of(server, {**ablate, "vector": ROW[2]})
    joy = {
        "vectors": [
            {"vector": JOY},
            {"vector": {"name": "joy", "layer": 2}, "weight": -2},
            {"vector": [1.0] * 8},
        ]
    }
    rows = {
        "vectors": [{"vector": [ROW[1], ROW[2]]}, {"vector": ROW[2], "weight": -2}, {"vector": [1.0] * 8}]
    }
    several = {"op": "steer", "at": "layers.1:3.output"}
    assert await keys_of(server, several | joy) == await keys_of(server, several | rows)
    probe = {"op": "probe", "at": "layers.2.output", "weights": JOY}
    assert await keys_of(server, probe) == await keys_of(server, {**probe, "weights": ROW[2]})


async def test_the_answer_says_which_version_it_was(server: Server) -> None:
    first = await make(server)
    second = await make(server, vectors={"1": [0.5] * 8})
    operations = [
        steer(),
        {"op": "capture", "at": "layers.1.output"},
        steer({"name": "joy@1"}),
        steer([1.0] * 8),
    ]
    whole = (await server.complete(interventions=operations)).json()["choices"][0]
    newest, capture, older, numbers = whole["interventions"]["applied"]
    assert newest["vector"] == {"name": "joy", "version": 2, "id": second["id"]}
    assert older["vector"] == {"name": "joy", "version": 1, "id": first["id"]}
    assert "vector" not in capture
    assert "vector" not in numbers
    streamed = await server.complete(interventions=operations, stream=True)
    events = [json.loads(line[6:]) for line in streamed.text.split("\n\n") if line.startswith("data: {")]
    assert events[-1]["choices"][0]["interventions"]["applied"][0]["vector"] == newest["vector"]
    chat = {"messages": [{"role": "user", "content": "hello"}], "interventions": operations}
    answer = (await server.client.post("/v1/chat/completions", json=chat)).json()["choices"][0]
    assert answer["interventions"]["applied"][2]["vector"] == older["vector"]


async def test_the_answer_has_all_vectors_of_an_operation(server: Server) -> None:
    joy = await make(server)
    anger = await make(server, name="anger")
    named = [{"vector": {"name": "anger"}, "weight": -1}, {"vector": [1.0] * 8}, {"vector": JOY}]
    both = {"op": "steer", "at": "layers.1.output", "vectors": named}
    numbers = {"op": "steer", "at": "layers.1.output", "vectors": [{"vector": [1.0] * 8}]}
    one = {"op": "steer", "at": "layers.1.output", "vectors": [{"vector": JOY}], "mode": "project_out"}
    answer = (await server.complete(interventions=[both, numbers, one])).json()["choices"][0]
    applied = answer["interventions"]["applied"]
    ids = [[used["id"] for used in entry.get("vectors", [])] for entry in applied]
    assert ids == [[anger["id"], joy["id"]], [], [joy["id"]]]
    assert "vectors" not in applied[1]
    assert not any("vector" in entry for entry in applied)


async def test_what_a_name_cannot_mean_is_refused(server: Server, error_of: ErrorCheck) -> None:
    await make(server)
    await make(server, name="inputs", vectors={"layers.1.output": ROW[1]})
    bad: list[tuple[dict[str, Any], str, str]] = [
        (steer({"name": "sorrow"}), "unknown_vector", "interventions.0.vector"),
        (steer({"name": "joy@2"}), "unknown_vector", "interventions.0.vector"),
        (steer({"name": "joy@0"}), "unknown_vector", "interventions.0.vector"),
        (steer({"name": "joy@" + "9" * 40}), "unknown_vector", "interventions.0.vector"),
        (steer({"name": "Joy'; DROP"}), "unknown_vector", "interventions.0.vector"),
        (steer(at="layers.0.output"), "vector_mismatch", "interventions.0.vector"),
        (steer(at="layers.*.output"), "vector_mismatch", "interventions.0.vector"),
        (steer(at="layers.1.input"), "vector_mismatch", "interventions.0.vector"),
        (steer({"name": "joy", "layer": 0}), "vector_mismatch", "interventions.0.vector"),
        (steer({"name": "joy", "layer": 9}), "unknown_layer", "interventions.0.vector.layer"),
        (steer(at="logits"), "unknown_point", "interventions.0.at"),
        (steer(at=["layers.1.output"] * 2), "invalid_value", "interventions.0.at"),
        (
            {
                "op": "steer",
                "at": "layers.1.output",
                "vectors": [{"vector": JOY}, {"vector": {"name": "sorrow"}}],
            },
            "unknown_vector",
            "interventions.0.vectors.1.vector",
        ),
        (
            {"op": "steer", "at": "layers.0.output", "vectors": [{"vector": JOY}]},
            "vector_mismatch",
            "interventions.0.vectors.0.vector",
        ),
        (
            {"op": "patch", "at": "layers.1.output", "values": JOY, "where": {"positions": [0]}},
            "unsupported_combination",
            "interventions.0.values",
        ),
    ]
    for operation, code, param in bad:
        for stream in (False, True):
            answer = await server.complete(interventions=[operation], stream=stream)
            error_of(answer, 400, code)
            assert answer.json()["error"]["param"] == param
    error_of(
        await server.complete(interventions=[steer({"name": "joy", "version": 1})]), 422, "invalid_shape"
    )
