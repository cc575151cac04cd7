"""Stored vectors: accepted uploads, their properties, and refusals that leave nothing behind."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.numpy

from api_schemas.keys import Scope
from tests.integration.conftest import ErrorCheck, Serve, Server
from tests.integration.tenants import Tenants
from tests.integration.vector_files import ROWS, WIDTH, as_safetensors, bad_files, good_files

NUMBERS = {str(layer): row.tolist() for layer, row in ROWS.items()}


async def upload(
    server: Server, content: bytes, file_name: str = "joy.safetensors", headers: Any = None, **fields: str
) -> httpx.Response:
    files = {"file": (file_name, content, "application/octet-stream")}
    form = {"name": "joy", **fields}
    return await server.client.post("/v1/vectors", files=files, data=form, headers=headers)


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


@pytest.mark.both_databases
async def test_names_have_versions_that_never_come_back(server: Server) -> None:
    first, second = await make(server), await make(server)
    assert (first["version"], second["version"]) == (1, 2)
    assert (await server.client.delete(f"/v1/vectors/{second['id']}")).status_code == 204
    assert (await make(server))["version"] == 3
    together = await asyncio.gather(*(make(server, name="calm") for _ in range(8)))
    assert sorted(made["version"] for made in together) == list(range(1, 9))


@pytest.mark.both_databases
async def test_lists_come_in_pages(server: Server, error_of: ErrorCheck) -> None:
    made = [await make(server, name=name) for name in ("joy", "calm", "joy")]
    first = (await server.client.get("/v1/vectors", params={"limit": 2})).json()
    assert [one["id"] for one in first["data"]] == [made[2]["id"], made[1]["id"]]
    assert first["has_more"]
    rest = (await server.client.get("/v1/vectors", params={"after": first["last_id"]})).json()
    assert rest["data"] == [made[0]]
    assert not rest["has_more"]
    named = (await server.client.get("/v1/vectors", params={"name": "joy"})).json()
    assert [one["version"] for one in named["data"]] == [2, 1]
    assert (await server.client.get(f"/v1/vectors/{made[0]['id']}")).json() == made[0]
    error_of(await server.client.get("/v1/vectors", params={"after": "vec_0"}), 404, "vector_not_found")
    assert (await server.client.delete(f"/v1/vectors/{made[0]['id']}")).status_code == 204
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        answer = await server.client.request(method, f"/v1/vectors/{made[0]['id']}{path}")
        error_of(answer, 404, "vector_not_found")


@pytest.mark.both_databases
async def test_they_outlive_the_server(serve: Serve) -> None:
    async with serve() as server:
        made = await make(server)
    async with serve() as server:
        assert (await server.client.get(f"/v1/vectors/{made['id']}")).json() == made


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


async def test_files_cut_off_anywhere_are_refused(server: Server, tmp_path: Path) -> None:
    for name, (kind, content) in good_files(tmp_path).items():
        whole = (await upload(server, content, name)).json()
        if kind != "json":
            for end in range(0, len(content), max(1, len(content) // 24)):
                answer = await upload(server, content[:end], name)
                # What only pads the end may be missing.
                is_whole = answer.status_code == 201 and answer.json()["sha256"] == whole["sha256"]
                assert is_whole or answer.status_code in {400, 415}, (name, end, answer.text)


async def test_files_with_a_byte_changed_are_taken_or_refused_and_never_break_the_server(
    server: Server, tmp_path: Path
) -> None:
    random = np.random.default_rng(0)
    for name, (_, content) in good_files(tmp_path).items():
        for place in random.integers(0, min(len(content), 400), 40):
            changed = bytearray(content)
            changed[place] ^= 1 << int(random.integers(8))
            answer = await upload(server, bytes(changed), name)
            assert answer.status_code in {201, 400, 415, 413}, (name, place, answer.text)


BAD_BODIES: list[tuple[dict[str, Any], int, str]] = [
    ({"vectors": NUMBERS}, 422, "invalid_shape"),
    ({"name": "Joy", "vectors": NUMBERS}, 422, "invalid_shape"),
    ({"name": "joy@2", "vectors": NUMBERS}, 422, "invalid_shape"),
    ({"name": "a" * 65, "vectors": NUMBERS}, 422, "invalid_shape"),
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
    ({"name": "joy", "vectors": NUMBERS, "shared": "yes"}, 422, "invalid_shape"),
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
    error_of(await upload(server, good, name="J"), 422, "invalid_shape")
    error_of(await upload(server, good, shared="maybe"), 422, "invalid_shape")
    error_of(await upload(server, good, vectors="x"), 400, "bad_request")
    error_of(await upload(server, good, at="layers.1.output"), 400, "invalid_vector_file")
    form = {"content-type": "multipart/form-data; boundary=x"}
    parts = 'content-disposition: form-data; name="{}"; filename="f"\r\n\r\nx\r\n--x'
    for content in (
        "",
        "--x--\r\n",
        "--x\r\n" + parts.format("other") + "--\r\n",
        f"--x\r\n{parts.format('file')}\r\n{parts.format('file')}--\r\n",
        "--x\r\n" + "a: b\r\n" * 5000 + "\r\n--x--",
        "--y\r\n\r\n--y--",
        '--x\r\ncontent-disposition: form-data; name="name"\r\n\r\n' + "a" * 100000 + "\r\n--x--\r\n",
    ):
        error_of(await server.client.post("/v1/vectors", content=content, headers=form), 400, "bad_request")
    without = {"content-type": "multipart/form-data"}
    error_of(await server.client.post("/v1/vectors", content="x", headers=without), 400, "bad_request")
    for origin in ("https://elsewhere.example", "null"):
        error_of(await upload(server, good, headers={"origin": origin}), 403, "origin_not_allowed")
    assert (await upload(server, good, headers={"origin": "http://localhost"})).status_code == 201
    raw = {"content-type": "application/octet-stream"}
    error_of(await server.client.post("/v1/vectors", content=good, headers=raw), 400, "bad_request")


@pytest.mark.both_databases
async def test_a_full_store_takes_no_more(serve: Serve, error_of: ErrorCheck) -> None:
    async with serve(vector_store_bytes=100) as server:
        made = await make(server)
        body = {"name": "joy", "vectors": NUMBERS}
        error_of(await server.client.post("/v1/vectors", json=body), 503, "vector_store_full")
        assert server.context.vectors.used_bytes == 64
        await server.client.delete(f"/v1/vectors/{made['id']}")
        await make(server)


@pytest.mark.both_databases
async def test_a_tenant_sees_its_own_and_shared_ones(tenants: Tenants, error_of: ErrorCheck) -> None:
    server, client = tenants.server, tenants.server.client
    operator, acme, other = [
        await tenants.headers(name, *scopes)
        for name, scopes in (("operator", ()), ("acme", (Scope.INTERVENTIONS,)), ("other",
        (Scope.INTERVENTIONS,)))
    ]  # fmt: skip
    own = await make(server, acme)
    shared = await make(server, operator, shared=True)
    hidden = await make(server, operator)
    for made in (own, hidden):
        for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
            answer = await client.request(method, f"/v1/vectors/{made['id']}{path}", headers=other)
            error_of(answer, 404, "vector_not_found")
    listed = (await client.get("/v1/vectors", headers=other)).json()["data"]
    assert [(one["id"], one["own"], one["shared"]) for one in listed] == [(shared["id"], False, True)]
    assert sorted(await content_of(server, shared["id"], other)) == ["layers.1.output", "layers.2.output"]
    error_of(
        await client.get("/v1/vectors", params={"after": own["id"]}, headers=other), 404, "vector_not_found"
    )
    error_of(await client.delete(f"/v1/vectors/{shared['id']}", headers=acme), 403, "missing_scope")
    body = {"name": "mine", "vectors": NUMBERS, "shared": True}
    error_of(await client.post("/v1/vectors", json=body, headers=acme), 403, "missing_scope")
    error_of(await upload(server, as_safetensors(), shared="true", headers=acme), 403, "missing_scope")
    second = await tenants.headers("second-operator")
    taken = await client.post("/v1/vectors", json={**body, "name": "joy"}, headers=second)
    error_of(taken, 409, "vector_name_taken")
    assert (await client.delete(f"/v1/vectors/{shared['id']}", headers=second)).status_code == 204
    assert server.context.vectors.used_bytes == 128  # of `own` and `hidden`


async def test_nothing_is_shared_on_a_server_without_keys(server: Server, error_of: ErrorCheck) -> None:
    body = {"name": "joy", "vectors": NUMBERS, "shared": True}
    error_of(await server.client.post("/v1/vectors", json=body), 401, "missing_api_key")
