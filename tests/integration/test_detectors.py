"""Stored detectors: accepted uploads, their properties, names, and refusals that leave nothing behind."""

from __future__ import annotations

import json
from typing import Any

import httpx
import numpy as np
import pytest

from api_schemas.detectors import DetectorName
from api_schemas.errors import ApiError, ErrorCode
from nnsight_engine.core.detector import Detector, DetectorPart, Form, Link
from tests.integration.conftest import ErrorCheck, Serve, Server
from tests.integration.detector_files import LINEAR, ROW, WIDTH, as_body, as_file, bad_files, random_detector

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
    row, detector = await server.context.detectors.named(given, tenant, "detector")
    return {"name": row.name, "version": row.version, "id": row.id}, detector


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
    for dtype in (np.float16, np.float64):
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


SAME_PLACE = ("layers.1.output", "layers.2.input")
BAD_BODIES: list[tuple[dict[str, Any], int, str]] = [
    ({"parts": []}, 422, "invalid_shape"),
    ({"parts": BODY["parts"] * 65}, 422, "invalid_shape"),
    ({"parts": BODY["parts"] * 2}, 400, "invalid_detector"),
    ({"parts": [{**BODY["parts"][0], "at": at} for at in SAME_PLACE]}, 400, "invalid_detector"),
    ({"parts": [{"at": "layers.1.output", "form": "linear"}]}, 400, "invalid_detector"),
    ({"parts": [{**BODY["parts"][0], "mean": ROW.tolist()}]}, 400, "invalid_detector"),
    ({"parts": [{**BODY["parts"][0], "depth": 3}]}, 422, "invalid_shape"),
    ({"parts": [{**BODY["parts"][0], "weights": {"name": "joy"}}]}, 422, "invalid_shape"),
    ({"parts": [{**BODY["parts"][0], "weights": [1e39] * 8}]}, 400, "not_finite"),
    ({"parts": [{**BODY["parts"][0], "weights": [-3e38] * 8}]}, 400, "not_finite"),
    ({"parts": [{**BODY["parts"][0], "weights": [1.0] * 2000}]}, 400, "wrong_width"),
    ({"parts": [{**BODY["parts"][0], "weights": [True] * 8}]}, 422, "invalid_shape"),
    ({"parts": [{**BODY["parts"][0], "at": "layers.9.output"}]}, 400, "unknown_layer"),
    ({"parts": [{**BODY["parts"][0], "at": "layers.0:2.output"}]}, 400, "invalid_detector"),
    ({"parts": [{**BODY["parts"][0], "at": 7}]}, 422, "invalid_shape"),
    ({"bias": "0"}, 422, "invalid_shape"),
    ({"bias": -1e39}, 400, "not_finite"),
    ({"threshold": True}, 422, "invalid_shape"),
    ({"calibration": [{"threshold": 0.5, "tpr": 0.5}]}, 422, "invalid_shape"),
]


async def test_bad_bodies_and_forms_are_refused(server: Server, error_of: ErrorCheck) -> None:
    for more, status, code in BAD_BODIES:
        answer = await server.client.post("/v1/detectors", json={**BODY, **more})
        assert answer.status_code == status, (more, answer.text)
        error_of(answer, status, code)
    good = as_file(LINEAR, {"weights": ROW})
    error_of(await upload(server, good, at="layers.1.output"), 400, "bad_request")
    error_of(await upload(server, good, head="{"), 400, "invalid_json")
    error_of(await upload(server, good, head="{}"), 422, "invalid_shape")
    await assert_nothing_stored(server)


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
        for kind in ("vectors", "detectors"):
            for one in (await server.client.get(f"/v1/{kind}")).json()["data"]:
                assert (await server.client.delete(f"/v1/{kind}/{one['id']}")).status_code == 204
        await make(server)


async def test_a_detector_that_does_not_fit_the_model_any_more_is_refused(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same name may stand for another model's weights."""
    await make(server)
    point, _ = server.engine.capabilities().points
    narrow = point.model_copy(update={"shape": [7], "width": 7})
    found = server.engine.capabilities().model_copy(update={"points": [narrow]})
    monkeypatch.setattr(server.engine, "capabilities", lambda: found)
    assert await refusal_of(server, "refusal@1") == ErrorCode.DETECTOR_MISMATCH
