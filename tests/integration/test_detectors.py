"""Stored detectors: accepted uploads, their properties, names, and refusals that leave nothing behind."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.numpy

from api_schemas.detectors import DetectorName
from api_schemas.errors import ApiError, ErrorCode
from api_schemas.keys import Scope
from app.storage.detectors import DetectorStore
from nnsight_engine.core.detector import Detector, DetectorPart, Form, Link
from tests.integration.conftest import ErrorCheck, Serve, Server
from tests.integration.detector_files import LINEAR, ROW, WIDTH, as_body, as_file, bad_files, random_detector
from tests.integration.tenants import Tenants

BODY: dict[str, Any] = {"name": "refusal", "parts": [{**LINEAR["parts"][0], "weights": ROW.tolist()}]}
NO_TENANT = ""


async def upload(
    server: Server, content: bytes, file_name: str = "refusal.safetensors", headers: Any = None, **fields: str
) -> httpx.Response:
    files = {"file": (file_name, content, "application/octet-stream")}
    form = {"name": "refusal", **fields}
    return await server.client.post("/v1/detectors", files=files, data=form, headers=headers)


async def make(server: Server, headers: Any = None, **body: object) -> dict[str, Any]:
    answer = await server.client.post("/v1/detectors", json={**BODY, **body}, headers=headers)
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made


async def content_of(server: Server, detector_id: str, headers: Any = None) -> bytes:
    answer = await server.client.get(f"/v1/detectors/{detector_id}/content", headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.content


async def resolved(server: Server, name: Any, tenant: str = NO_TENANT) -> tuple[Any, Detector]:
    given = DetectorName.model_validate(name)
    used, detector = await server.context.detectors.resolved(given, tenant, "detector")
    return used.model_dump(), detector


async def refusal_of(server: Server, name: Any, tenant: str = NO_TENANT) -> ErrorCode:
    with pytest.raises(ApiError) as caught:
        await resolved(server, name, tenant)
    assert caught.value.param == "detector"
    return caught.value.code


async def assert_nothing_stored(server: Server) -> None:
    assert (await server.client.get("/v1/detectors")).json()["data"] == []
    assert server.context.detectors.used_bytes == 0


@pytest.mark.both_databases
async def test_a_file_its_numbers_as_json_and_its_content_are_one_detector(server: Server) -> None:
    random = np.random.default_rng(9)
    for seed in range(12):
        head, tensors = random_detector(seed)
        name = f"d{seed}"
        as_metadata = (await upload(server, as_file(head, tensors), name=name)).json()
        as_field = (await upload(server, as_file(None, tensors), head=json.dumps(head), name=name)).json()
        as_json = await make(server, **as_body(head, tensors, name))
        again = await upload(server, await content_of(server, as_json["id"]), name=name)
        every = [as_metadata, as_field, as_json, again.json()]
        assert [one["version"] for one in every] == [1, 2, 3, 4]
        assert len({one["sha256"] for one in every}) == 1
        for one in every:
            assert {key: one[key] for key in head if key != "parts"} == {
                key: value for key, value in head.items() if key != "parts"
            }
            assert [{key: part[key] for key in ("at", "form")} for part in one["parts"]] == head["parts"]
            assert (await server.client.get(f"/v1/detectors/{one['id']}")).json() == one
        # In memory it is what was sent.
        used, detector = await resolved(server, f"{name}@2")
        assert used == {"name": name, "version": 2, "id": as_field["id"]}
        values = {part["at"]: random.normal(size=(5, WIDTH)).astype(np.float32) for part in head["parts"]}
        parts = [
            DetectorPart(
                part["at"],
                Form(part["form"]),
                {
                    key.removeprefix(f"parts.{index}."): tensor
                    for key, tensor in tensors.items()
                    if key.startswith(f"parts.{index}.")
                },
            )
            for index, part in enumerate(head["parts"])
        ]
        expected = Detector(tuple(parts), head["bias"], Link(head["link"]), head["threshold"])
        assert detector.threshold == head["threshold"]
        np.testing.assert_array_equal(detector.scores(values), expected.scores(values))


async def test_what_may_be_left_out(server: Server) -> None:
    short = await upload(server, as_file(None, {"weights": ROW}), head=json.dumps(LINEAR))
    full = await make(server, bias=0, link="identity")
    assert short.json()["sha256"] == full["sha256"]
    assert (full["bias"], full["link"], full["threshold"], full["calibration"]) == (0, "identity", None, [])
    assert full["parts"] == [{"at": "layers.1.output", "form": "linear", "width": 8, "hidden": None}]
    counted = await make(server, parts=[{**BODY["parts"][0], "at": "layers.-3.output"}])
    assert counted["sha256"] == full["sha256"]
    hidden = np.eye(WIDTH)[:3].tolist()
    mlp = {"at": "layers.0.output", "form": "mlp", "hidden_weights": hidden, "weights": [1, 1, 1]}
    distance = {"at": "layers.2.output", "form": "distance", "mean": ROW.tolist()}
    made = await make(server, parts=[mlp, distance])
    assert made["parts"][0]["hidden"] == 3
    _, detector = await resolved(server, {"name": "refusal", "id": made["id"]})
    values = np.random.default_rng(0).normal(size=(2, 6, WIDTH)).astype(np.float32)
    expected = np.maximum(values[0][:, :3], 0).sum(axis=1) - np.linalg.norm(values[1] - ROW, axis=1)
    found = detector.scores({"layers.0.output": values[0], "layers.2.output": values[1]})
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    widths = {"float16": np.float16, "float64": np.float64}
    for dtype in widths.values():
        same = as_file(LINEAR, {"parts.0.weights": ROW.astype(dtype)})
        assert (await upload(server, same)).json()["sha256"] == full["sha256"]


async def test_long_numbers_in_json_come_in_any_form(server: Server) -> None:
    """Lists of more than a thousand numbers are tensors before anything counts their values."""
    hidden = np.random.default_rng(0).normal(size=(300, WIDTH)).astype(np.float32)
    part = {"at": "layers.0.output", "form": "mlp"}
    weights = hidden[:, 0].copy()
    file = as_file({"parts": [part]}, {"parts.0.hidden_weights": hidden, "parts.0.weights": weights})
    body = {**part, "hidden_weights": hidden.tolist(), "weights": weights.tolist()}
    made = await make(server, parts=[body])
    assert made["sha256"] == (await upload(server, file)).json()["sha256"]


@pytest.mark.both_databases
async def test_names_have_versions_that_never_come_back(server: Server) -> None:
    first, second = await make(server), await make(server)
    assert (first["version"], second["version"]) == (1, 2)
    assert first["id"].startswith("det_")
    assert (await server.client.delete(f"/v1/detectors/{second['id']}")).status_code == 204
    assert (await make(server))["version"] == 3
    together = await asyncio.gather(*(make(server, name="calm") for _ in range(8)))
    assert sorted(made["version"] for made in together) == list(range(1, 9))


@pytest.mark.both_databases
async def test_lists_come_in_pages(server: Server, error_of: ErrorCheck) -> None:
    made = [await make(server, name=name) for name in ("refusal", "calm", "refusal")]
    first = (await server.client.get("/v1/detectors", params={"limit": 2})).json()
    assert [one["id"] for one in first["data"]] == [made[2]["id"], made[1]["id"]]
    assert first["has_more"]
    rest = (await server.client.get("/v1/detectors", params={"after": first["last_id"]})).json()
    assert rest["data"] == [made[0]]
    named = (await server.client.get("/v1/detectors", params={"name": "refusal"})).json()
    assert [one["version"] for one in named["data"]] == [2, 1]
    error_of(await server.client.get("/v1/detectors", params={"after": "det_0"}), 404, "detector_not_found")
    assert (await server.client.delete(f"/v1/detectors/{made[0]['id']}")).status_code == 204
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        answer = await server.client.request(method, f"/v1/detectors/{made[0]['id']}{path}")
        error_of(answer, 404, "detector_not_found")


async def test_bad_files_are_refused_and_leave_nothing(server: Server, error_of: ErrorCheck) -> None:
    wrong = {}
    for case, (content, status, code, message) in bad_files().items():
        answer = await upload(server, content)
        if answer.status_code != status or message not in error_of(answer, status, code):
            wrong[case] = answer.text
    assert wrong == {}
    for ending in ("pt", "pth", "bin", "pkl", "ckpt"):
        answer = await upload(server, as_file(LINEAR, {"weights": ROW}), f"refusal.{ending}")
        assert "runs its code" in error_of(answer, 415, "unsupported_vector_format")
    await assert_nothing_stored(server)
    assert (await make(server))["version"] == 1


BAD_BODIES: list[tuple[dict[str, Any], int, str]] = [
    ({"name": "Refusal"}, 422, "invalid_shape"),
    ({"name": "refusal@2"}, 422, "invalid_shape"),
    ({"parts": []}, 422, "invalid_shape"),
    ({"parts": BODY["parts"] * 65}, 422, "invalid_shape"),
    ({"parts": BODY["parts"] * 2}, 400, "invalid_detector"),
    ({"parts": [{"at": "layers.1.output", "form": "linear"}]}, 400, "invalid_detector"),
    ({"parts": [{**BODY["parts"][0], "mean": ROW.tolist()}]}, 400, "invalid_detector"),
    ({"parts": [{**BODY["parts"][0], "depth": 3}]}, 422, "invalid_shape"),
    ({"parts": [{**BODY["parts"][0], "weights": {"name": "joy"}}]}, 422, "invalid_shape"),
    ({"parts": [{**BODY["parts"][0], "weights": [1e39] * 8}]}, 400, "not_finite"),
    ({"parts": [{**BODY["parts"][0], "weights": [1.0] * 2000}]}, 400, "wrong_width"),
    ({"parts": [{**BODY["parts"][0], "weights": [True] * 8}]}, 422, "invalid_shape"),
    ({"parts": [{**BODY["parts"][0], "at": "layers.9.output"}]}, 400, "unknown_layer"),
    ({"parts": [{**BODY["parts"][0], "at": "layers.0:2.output"}]}, 400, "invalid_detector"),
    ({"parts": [{**BODY["parts"][0], "at": 7}]}, 422, "invalid_shape"),
    ({"bias": "0"}, 422, "invalid_shape"),
    ({"bias": -1e39}, 400, "not_finite"),
    ({"threshold": True}, 422, "invalid_shape"),
    ({"shared": "yes"}, 422, "invalid_shape"),
    ({"shared": True}, 401, "missing_api_key"),
    ({"calibration": [{"threshold": 0.5, "tpr": 0.5}]}, 422, "invalid_shape"),
]


async def test_bad_bodies_and_forms_are_refused(server: Server, error_of: ErrorCheck) -> None:
    for more, status, code in BAD_BODIES:
        answer = await server.client.post("/v1/detectors", json={**BODY, **more})
        assert answer.status_code == status, (more, answer.text)
        error_of(answer, status, code)
    good = as_file(LINEAR, {"weights": ROW})
    error_of(await upload(server, good, name="R"), 422, "invalid_shape")
    error_of(await upload(server, good, at="layers.1.output"), 400, "bad_request")
    error_of(await upload(server, good, head="{"), 400, "invalid_json")
    error_of(await upload(server, good, head="{}"), 422, "invalid_shape")
    raw = {"content-type": "application/octet-stream"}
    error_of(await server.client.post("/v1/detectors", content=good, headers=raw), 400, "bad_request")
    await assert_nothing_stored(server)


async def test_files_corrupted_anywhere_are_taken_whole_or_refused(server: Server) -> None:
    """Whatever bytes come, the answer is a typed error or a detector whose numbers are those of the file."""
    random = np.random.default_rng(0)
    num_refused = 0
    for seed in range(150):
        head, tensors = random_detector(seed % 10)
        changed = bytearray(as_file(head, tensors))
        match seed % 3:
            case 0:
                for _ in range(int(random.integers(1, 4))):
                    changed[int(random.integers(0, len(changed)))] ^= 1 << int(random.integers(8))
            case 1:
                del changed[int(random.integers(0, len(changed))) :]
            case 2:
                start, stop = sorted(int(one) for one in random.integers(0, len(changed), 2))
                changed[start:stop] = random.bytes(int(random.integers(0, 40)))
        before = server.context.detectors.used_bytes
        answer = await upload(server, bytes(changed))
        if answer.status_code == 201:
            made = answer.json()
            _, detector = await resolved(server, {"name": "refusal", "id": made["id"]})
            sent = safetensors.numpy.load(bytes(changed))
            for index, part in enumerate(detector.parts):
                for name, tensor in part.tensors.items():
                    assert np.isfinite(tensor).all()
                    given = sent.get(f"parts.{index}.{name}")
                    if given is not None:
                        np.testing.assert_array_equal(tensor, given)
        else:
            num_refused += 1
            assert answer.status_code in {400, 415, 422}, answer.text
            assert answer.json()["error"]["code"] in set(ErrorCode)
            assert server.context.detectors.used_bytes == before
    assert num_refused > 80


async def test_a_detector_has_so_many_bytes(serve: Serve, error_of: ErrorCheck) -> None:
    async with serve(max_tensor_bytes=63) as server:
        parts = [{**BODY["parts"][0], "at": f"layers.{layer}.output"} for layer in range(2)]
        answer = await server.client.post("/v1/detectors", json={**BODY, "parts": parts})
        error_of(answer, 400, "tensor_too_large")
        head = {"parts": [{"at": part["at"], "form": "linear"} for part in parts]}
        file = as_file(head, {f"parts.{index}.weights": ROW for index in range(2)})
        error_of(await upload(server, file), 400, "tensor_too_large")
        error_of(await upload(server, b"\0" * (2**20 + 4096)), 413, "body_too_large")
        await assert_nothing_stored(server)
        await make(server)


@pytest.mark.both_databases
async def test_vectors_and_detectors_fill_one_store(serve: Serve, error_of: ErrorCheck) -> None:
    async with serve() as server:
        num_bytes = (await make(server))["bytes"]
        assert server.context.detectors.used_bytes == num_bytes > 32
    vector = {"name": "joy", "vectors": {"1": ROW.tolist()}}
    async with serve(vector_store_bytes=num_bytes + 32) as server:
        error_of(await server.client.post("/v1/detectors", json=BODY), 503, "vector_store_full")
        assert (await server.client.post("/v1/vectors", json=vector)).status_code == 201
        error_of(await server.client.post("/v1/vectors", json=vector), 503, "vector_store_full")
        stored = server.context.scrape
        assert stored is not None
        for kind in ("vectors", "detectors"):
            for one in (await server.client.get(f"/v1/{kind}")).json()["data"]:
                assert (await server.client.delete(f"/v1/{kind}/{one['id']}")).status_code == 204
        await make(server)


@pytest.mark.both_databases
async def test_a_tenant_sees_its_own_and_shared_ones(tenants: Tenants, error_of: ErrorCheck) -> None:
    server, client = tenants.server, tenants.server.client
    operator = await tenants.headers("operator")
    acme, other = [await tenants.headers(name, Scope.INTERVENTIONS) for name in ("acme", "other")]
    own = await make(server, acme)
    shared = await make(server, operator, shared=True)
    hidden = await make(server, operator)
    for made in (own, hidden):
        for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
            answer = await client.request(method, f"/v1/detectors/{made['id']}{path}", headers=other)
            error_of(answer, 404, "detector_not_found")
        assert await refusal_of(server, {"name": "refusal", "id": made["id"]}, "other") == "unknown_detector"
    listed = (await client.get("/v1/detectors", headers=other)).json()["data"]
    assert [(one["id"], one["own"], one["shared"]) for one in listed] == [(shared["id"], False, True)]
    # A name means a tenant's own once it has one, even after it is removed; with an id it means that one.
    assert (await resolved(server, "refusal", "other"))[0]["id"] == shared["id"]
    assert (await resolved(server, "refusal", "acme"))[0]["id"] == own["id"]
    by_id = {"name": "refusal@1", "id": shared["id"]}
    assert (await resolved(server, by_id, "acme"))[0]["id"] == shared["id"]
    assert (await client.delete(f"/v1/detectors/{own['id']}", headers=acme)).status_code == 204
    assert await refusal_of(server, "refusal", "acme") == "unknown_detector"
    error_of(await client.delete(f"/v1/detectors/{shared['id']}", headers=acme), 403, "missing_scope")
    body = {**BODY, "name": "mine", "shared": True}
    error_of(await client.post("/v1/detectors", json=body, headers=acme), 403, "missing_scope")
    second = await tenants.headers("second-operator")
    taken = await client.post("/v1/detectors", json={**body, "name": "refusal"}, headers=second)
    error_of(taken, 409, "detector_name_taken")
    none = await tenants.headers("acme", Scope.COMPLETIONS)
    error_of(await client.get("/v1/detectors", headers=none), 403, "missing_scope")


async def test_detectors_count_among_a_tenants_stored_bytes(tenants: Tenants, error_of: ErrorCheck) -> None:
    operator, acme = await tenants.headers("operator"), await tenants.headers("acme")
    num_bytes = (await make(tenants.server, acme))["bytes"]
    limit = {"stored_bytes": 2 * num_bytes}
    await tenants.send("PUT", "/v1/admin/tenants/acme/limits", operator, json=limit)
    answers = await asyncio.gather(
        *(tenants.send("POST", "/v1/detectors", acme, json=BODY) for _ in range(4))
    )
    assert sorted(answer.status_code for answer in answers) == [201, 403, 403, 403]
    message = error_of(next(one for one in answers if one.status_code == 403), 403, "stored_bytes_full")
    assert "/v1/detectors" in message


async def test_names_that_mean_nothing_are_refused(server: Server) -> None:
    made = await make(server)
    assert await refusal_of(server, "calm") == ErrorCode.UNKNOWN_DETECTOR
    assert await refusal_of(server, "refusal@2") == ErrorCode.UNKNOWN_DETECTOR
    assert await refusal_of(server, "Refusal!") == ErrorCode.UNKNOWN_DETECTOR
    assert await refusal_of(server, {"name": "refusal@2", "id": made["id"]}) == ErrorCode.UNKNOWN_DETECTOR
    assert await refusal_of(server, {"name": "calm", "id": made["id"]}) == ErrorCode.UNKNOWN_DETECTOR
    await server.client.delete(f"/v1/detectors/{made['id']}")
    assert await refusal_of(server, "refusal@1") == ErrorCode.UNKNOWN_DETECTOR


async def test_a_detector_belongs_to_its_model(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    made = await make(server)
    served = server.engine.served()
    with monkeypatch.context() as patch:
        other = type(served)(("other-model",), served.source, served.fingerprint)
        patch.setattr(server.engine, "served", lambda: other)
        assert await refusal_of(server, "refusal") == ErrorCode.DETECTOR_MISMATCH
        again = await make(server)  # of the other model
        assert (await resolved(server, "refusal"))[0]["id"] == again["id"]
    assert (await resolved(server, "refusal"))[0]["id"] == made["id"]
    # The same name may stand for another model's weights: then the width says so.
    (point,) = server.engine.capabilities().points
    narrow = point.model_copy(update={"shape": [7], "width": 7})
    found = server.engine.capabilities().model_copy(update={"points": [narrow]})
    monkeypatch.setattr(server.engine, "capabilities", lambda: found)
    assert await refusal_of(server, "refusal@1") == ErrorCode.DETECTOR_MISMATCH


async def test_a_hot_detectors_file_is_read_once(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    original = DetectorStore.data

    async def counted(self: DetectorStore, number: int) -> bytes | None:
        read.append(number)
        return await original(self, number)

    monkeypatch.setattr(DetectorStore, "data", counted)
    async with serve() as server:
        await make(server)
        for _ in range(3):
            await resolved(server, "refusal")
    assert read == [1]
    async with serve(vector_cache_bytes=0) as server:
        for _ in range(2):
            await resolved(server, "refusal")
    assert read == [1, 1, 1]
