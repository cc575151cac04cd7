"""Stored vectors: files and bodies that are taken or refused, and what their names mean in operations."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.numpy

from api_schemas.interventions import parse_interventions
from api_schemas.operation_names import tensors_of
from app.catalog.names import StoredNames
from nnsight_engine.plans.compile.tensors import read_tensor
from tests.integration.conftest import ErrorCheck, Server
from tests.integration.vector_files import ROWS, WIDTH, as_safetensors, bad_files, good_files

NUMBERS = {str(layer): row.tolist() for layer, row in ROWS.items()}


async def upload(
    server: Server,
    content: bytes,
    file_name: str = "joy.safetensors",
    headers: Any = None,
    params: Any = None,
    **fields: str,
) -> httpx.Response:
    files = {"file": (file_name, content, "application/octet-stream")}
    form = {"name": "joy", **fields}
    return await server.client.post("/v1/vectors", files=files, data=form, headers=headers, params=params)


async def make(server: Server, headers: Any = None, **body: object) -> dict[str, Any]:
    sent = {"name": "joy", "vectors": NUMBERS, **body}
    answer = await server.client.post("/v1/vectors", json=sent, headers=headers)
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made


async def content_of(server: Server, vector_id: str, headers: Any = None) -> dict[str, Any]:
    answer = await server.client.get(f"/v1/vectors/{vector_id}/content", headers=headers)
    assert answer.status_code == 200, answer.text
    return safetensors.numpy.load(answer.content)


async def test_every_format_brings_the_same_numbers(server: Server, tmp_path: Path) -> None:
    hashes = set()
    for name, (kind, content) in good_files(tmp_path).items():
        answer = await upload(server, content, name)
        assert answer.status_code == 201, (name, answer.text)
        made = answer.json()
        assert (made["format"], made["at"], made["layers"], made["width"]) == (
            kind,
            "layers.*.output",
            [1, 2],
            8,
        )
        assert made["bytes"] == 2 * WIDTH * 4
        hashes.add(made["sha256"])
        found = await content_of(server, made["id"])
        assert sorted(found) == ["layers.1.output", "layers.2.output"]
        np.testing.assert_array_equal(found["layers.2.output"], ROWS[2])
    assert len(hashes) == 1
    sent_back = (await server.client.get(f"/v1/vectors/{made['id']}/content")).content
    assert (await upload(server, sent_back)).json()["sha256"] in hashes


async def test_another_model_in_a_file_is_told(server: Server, error_of: ErrorCheck) -> None:
    made = await make(server)
    ours = (await server.client.get(f"/v1/vectors/{made['id']}/content")).content
    tensors = safetensors.numpy.load(ours)
    theirs = safetensors.numpy.save(tensors, {"model": "gpt2-small"})
    for content, strict, warned in ((ours, True, 0), (as_safetensors(), True, 0), (theirs, False, 1)):
        answer = await upload(server, content, params={"strict": strict})
        assert (answer.status_code, len(answer.json()["warnings"])) == (201, warned)
    assert "'gpt2-small'" in answer.json()["warnings"][0]
    refused = await upload(server, theirs, params={"strict": True})
    assert "'gpt2-small'" in error_of(refused, 400, "vector_mismatch")


async def test_a_file_brings_its_training_unless_that_is_of_other_numbers(
    server: Server, error_of: ErrorCheck
) -> None:
    score = {"auroc": 1.0, "accuracy": 0.5, "separation": 2.0, "bias": -0.5, "norm": 3.0}
    training = {
        "method": "pca", "position": "mean", "holdout": 0.25, "seed": 0, "num_positive": 6, "num_negative": 6,
        "num_held_out": 4, "best_layer": 2, "layers": [{"layer": layer, **score} for layer in ROWS],
    }  # fmt: skip
    sha256 = (await upload(server, as_safetensors())).json()["sha256"]

    def file(given: Any = None, **metadata: str) -> bytes:
        text = json.dumps(training) if given is None else given
        tensors = {f"layers.{layer}.output": row for layer, row in ROWS.items()}
        return safetensors.numpy.save(tensors, {"training": text, "sha256": sha256, **metadata})

    made = (await upload(server, file())).json()
    assert (made["training"], made["warnings"], made["format"]) == (training, [], "safetensors")
    content = (await server.client.get(f"/v1/vectors/{made['id']}/content")).content
    with_training = (await upload(server, content)).json()
    assert with_training["training"] == training
    assert with_training["source_sha256"] == hashlib.sha256(content).hexdigest()
    fewer = json.dumps({**training, "layers": training["layers"][:1]})  # type: ignore[index] # a list
    for other in (file(sha256="0" * 64), file(fewer)):
        answer = (await upload(server, other)).json()
        assert answer["training"] is None
        assert "not of its numbers" in answer["warnings"][0]
    for wrong, status, code in (
        ("{", 400, "invalid_json"),
        ("[" * 20, 400, "json_too_deep"),
        ("{}", 422, "invalid_shape"),
        (json.dumps({**training, "holdout": float("nan")}), 400, "not_finite"),
    ):
        assert (
            "`training`" in error_of(await upload(server, file(wrong)), status, code)
            or code == "json_too_deep"
        )


@pytest.mark.both_databases
async def test_numbers_come_as_json_too(server: Server) -> None:
    made = await make(server)
    assert (made["format"], made["version"], made["own"], made["shared"]) == ("json", 1, True, False)
    assert made["id"].startswith("vec_")
    by_point = await make(server, vectors={"layers.1.output": NUMBERS["1"], "2": NUMBERS["2"]})
    rows = [NUMBERS["1"], NUMBERS["2"]]
    several = await make(server, vectors=None, at=["layers.1.output", "layers.2.output"], values=rows)
    ranged = await make(server, vectors=None, at="layers.1:3.output", values=rows)
    assert made["sha256"] == by_point["sha256"] == several["sha256"] == ranged["sha256"]
    everywhere = await make(server, vectors=None, at="layers.*.output", values=NUMBERS["1"])
    assert everywhere["layers"] == [0, 1, 2, 3]
    one = safetensors.numpy.save({"direction": np.stack([ROWS[1], ROWS[2]])})
    assert (await upload(server, one, at="layers.1:3.output")).json()["sha256"] == made["sha256"]
    assert (await upload(server, one, at="layers.1.output, layers.2.output")).json()["sha256"] == made[
        "sha256"
    ]


async def test_bad_files_are_refused_and_leave_nothing(
    server: Server, tmp_path: Path, error_of: ErrorCheck
) -> None:
    wrong = {}
    for case, (name, content, status, code, message) in bad_files(tmp_path).items():
        answer = await upload(server, content, name)
        if answer.status_code != status or message not in error_of(answer, status, code):
            wrong[case] = answer.text
    assert wrong == {}
    assert (await server.client.get("/v1/vectors")).json()["data"] == []
    assert server.context.vectors.used_bytes == 0
    assert (await make(server))["version"] == 1


BAD_BODIES: list[tuple[dict[str, Any], int, str]] = [
    ({"name": "joy"}, 422, "invalid_shape"),
    ({"name": "joy", "vectors": {}}, 422, "invalid_shape"),
    ({"name": "joy", "vectors": NUMBERS, "at": "layers.1.output"}, 422, "invalid_shape"),
    ({"name": "joy", "vectors": {"1": {"name": "calm"}}}, 422, "invalid_shape"),
    ({"name": "joy", "vectors": {"1": [[1.0] * 8] * 2}}, 400, "wrong_width"),
    ({"name": "joy", "vectors": {"1": [1.0] * 7}}, 400, "wrong_width"),
    ({"name": "joy", "vectors": {"1": [1e39] * 8}}, 400, "not_finite"),
    ({"name": "joy", "vectors": {"-1": [1.0] * 8}}, 400, "invalid_vector_file"),
    ({"name": "joy", "vectors": {"99": [1.0] * 8}}, 400, "unknown_layer"),
    ({"name": "joy", "vectors": {"1": [1.0] * 8, "01": [1.0] * 8}}, 400, "invalid_vector_file"),
    ({"name": "joy", "at": "logits", "values": [1.0] * 8}, 400, "unknown_point"),
    ({"name": "joy", "at": "layers.9.output", "values": [1.0] * 8}, 400, "unknown_layer"),
    ({"name": "joy", "at": ["layers.1.output"] * 2, "values": [1.0] * 8}, 400, "invalid_value"),
    ({"name": "joy", "at": "layers.1:3.output", "values": [[1.0] * 8] * 3}, 400, "wrong_width"),
    (
        {"name": "joy", "vectors": {"1": {"dtype": "float32", "shape": [8], "data": "AAAA"}}},
        400,
        "wrong_encoding",
    ),
]


async def test_bad_bodies_are_refused(server: Server, error_of: ErrorCheck) -> None:
    for body, status, code in BAD_BODIES:
        error_of(await server.client.post("/v1/vectors", json=body), status, code)
    assert (await server.client.get("/v1/vectors")).json()["data"] == []


async def test_bad_forms_are_refused(server: Server, error_of: ErrorCheck) -> None:
    good = as_safetensors()
    error_of(await upload(server, good, vectors="x"), 400, "bad_request")
    error_of(await upload(server, good, at="layers.1.output"), 400, "invalid_vector_file")


ROW = {layer: row.tolist() for layer, row in ROWS.items()}
JOY = {"name": "joy"}


def steer(vector: Any = JOY, at: Any = "layers.1.output", **rest: Any) -> dict[str, Any]:
    return {"op": "steer", "at": at, "vector": vector, **rest}


async def keys_of(server: Server, operation: dict[str, Any], tenant: str = "") -> str:
    """Return the hashes of an operation's tensors, by which plans know them."""
    operations = parse_interventions([operation])
    context = server.context
    names = StoredNames(context.vectors, context.detectors, context.dictionaries, tenant)
    (resolved,) = await names.resolved(operations)
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
