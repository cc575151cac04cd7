"""Presets: kept in versions, named in requests, and limited by keys."""

from __future__ import annotations

import json
from typing import Any

import pytest

from api_schemas.administration import Scope, Tier
from api_schemas.presets import MAX_PRESET_BYTES, MAX_PRESETS
from app.http.vllm_routes import VLLM_ROUTES
from tests.fakes.results import MODEL
from tests.integration.conftest import ErrorCheck, Serve, Server
from tests.integration.tenants import Tenants
from tests.integration.vector_files import ROWS

STEER = {"op": "steer", "at": "layers.1.output", "vector": [1.0] * 8, "scale": 0.5}
CAPTURE = {"op": "capture", "at": "layers.2.output", "name": "kept"}
TRACE = {"op": "trace", "code": "save(x=1)"}
PROMPT = {"prompt": "one two three"}
USER = (Scope.COMPLETIONS, Scope.INTERVENTIONS)


async def make(server: Server, *interventions: Any, headers: Any = None, **more: Any) -> dict[str, Any]:
    body = {"name": "calm", "interventions": interventions or [STEER], **more}
    answer = await server.client.post("/v1/presets", json=body, headers=headers)
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made


async def generate(
    server: Server, headers: Any = None, route: str = "/v1/completions", **body: Any
) -> dict[str, Any]:
    answer = await server.client.post(route, json={**PROMPT, **body}, headers=headers)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def interventions_of(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what was done to each choice, without the presets that it came from."""
    done = [choice["interventions"] for choice in answer["choices"]]
    for one in done:
        one["provenance"].pop("presets", None)
    return done


@pytest.mark.both_databases
async def test_a_version_of_a_preset_never_changes(server: Server) -> None:
    first = await make(server, description="calmer answers")
    assert (first["object"], first["description"], first["model"]) == ("preset", "calmer answers", MODEL)
    assert (first["interventions"], first["operations"]) == ([STEER], ["steer"])
    second = await make(server, STEER, CAPTURE)
    assert second["operations"] == ["steer", "capture"]
    get = server.client.get
    assert (await get("/v1/presets/calm")).json() == second
    assert (await get("/v1/presets/calm@1")).json() == first
    assert "interventions" not in (await get("/v1/presets")).json()["data"][0]
    assert (await server.client.delete("/v1/presets/calm")).status_code == 204
    assert (await get("/v1/presets/calm")).json() == first


@pytest.mark.both_databases
async def test_put_makes_a_version_only_where_something_has_changed(server: Server) -> None:
    async def put(**body: Any) -> tuple[int, int]:
        answer = await server.client.put(
            "/v1/presets", json={"name": "calm", "interventions": [STEER], **body}
        )
        return answer.status_code, answer.json()["version"]

    assert await put() == (201, 1)
    assert await put() == (200, 1)
    assert await put(description="calmer") == (201, 2)
    assert await put(interventions=[STEER, CAPTURE], description="calmer") == (201, 3)
    assert await put(interventions=[STEER, CAPTURE], description="calmer") == (200, 3)


async def test_operations_come_from_the_model_the_header_the_body_and_the_request_in_this_order(
    server: Server,
) -> None:
    layers = {"one": 0, "two": 1, "three": 2, "four": 3}
    operations = {name: {**STEER, "at": f"layers.{layer}.output"} for name, layer in layers.items()}
    for name, operation in operations.items():
        await make(server, operation, name=name)
    answer = await generate(
        server,
        {"x-nnsight-preset": "two,one"},
        model=f"{MODEL}:one",
        preset=["three", "two"],
        interventions=[operations["four"]],
    )
    done = answer["choices"][0]["interventions"]
    assert [one["at"] for one in done["applied"]] == [[f"layers.{layer}.output"] for layer in range(4)]
    assert done["provenance"]["presets"] == ["one@1", "two@1", "three@1"]


async def test_each_prompt_of_a_batch_gets_them(server: Server) -> None:
    await make(server, {**CAPTURE, "prompts": [1]}, {**STEER})
    answer = await generate(server, prompt=["one two", "three"], preset="calm")
    applied = [[one["op"] for one in choice["interventions"]["applied"]] for choice in answer["choices"]]
    assert applied == [["steer"], ["capture", "steer"]]
    refused = await server.complete(preset="calm")
    assert refused.json()["error"]["param"] == "interventions.0.prompts"


async def test_an_unknown_preset_is_named(server: Server, error_of: ErrorCheck) -> None:
    await make(server)
    for name in ("none", "calm@7", "calm@0", "Calm", "", "calm@", "a" * 5000, "\x00", "calm@1,calm"):
        message = error_of(await server.complete(preset=["calm", name]), 404, "preset_not_found")
        assert repr(name[:5])[:4] in message
        answer = await server.complete(model=f"{MODEL}:{name}")
        error_of(answer, 404, "model_not_found")
        assert answer.json()["error"]["param"] == "model"
    header = {"x-nnsight-preset": "calm, none"}
    answer = await server.client.post("/v1/completions", json=PROMPT, headers=header)
    assert "none" in error_of(answer, 404, "preset_not_found")
    assert answer.json()["error"]["param"] == "x-nnsight-preset"
    error_of(await server.complete(model="another:calm"), 404, "model_not_found")
    assert server.engine.num_calls == 1  # the last one, whose name means no preset here


async def test_names_of_presets_in_requests_are_checked(server: Server, error_of: ErrorCheck) -> None:
    await make(server)
    wrong: list[Any] = [1, {"name": "calm"}, ["calm", 1], [["calm"]], True]
    for given in wrong:
        error_of(await server.complete(preset=given), 422, "invalid_shape")
    error_of(await server.complete(preset=["calm"] * (MAX_PRESETS + 1)), 400, "invalid_value")
    for name in ("presets", "Preset", "pre_set"):
        message = error_of(await server.complete(**{name: "calm"}), 422, "invalid_shape")
        assert "did you mean `preset`?" in message
    nested = {"extra_body": {"preset": "calm"}}
    assert "preset" in error_of(await server.complete(**nested), 422, "invalid_shape")
    none: list[Any] = [None, []]
    for given in none:
        assert "interventions" not in (await generate(server, preset=given))["choices"][0]
    error_of(await server.complete(preset="calm", interventions="x"), 422, "invalid_shape")


async def test_what_applies_to_written_out_operations_applies_to_presets(
    serve: Serve, error_of: ErrorCheck
) -> None:
    async with serve(max_operations=3) as server:
        await make(server, *[STEER] * 2)
        await make(server, CAPTURE, name="reads")
        await make(server, TRACE, name="code")
        over = await server.complete(preset="calm", interventions=[STEER] * 2)
        error_of(over, 400, "too_many_operations")
        twice = await server.complete(preset="reads", interventions=[CAPTURE])
        message = error_of(twice, 400, "duplicate_name")
        assert "reads@1" in message
        assert "'kept'" in message
        both = await server.complete(preset=["calm", "code"])
        error_of(both, 400, "unsupported_combination")


BAD: list[tuple[dict[str, Any], int, str]] = [
    ({"name": "calm"}, 422, "invalid_shape"),
    ({"name": "calm", "interventions": []}, 422, "invalid_shape"),
    ({"name": "calm", "interventions": None}, 422, "invalid_shape"),
    ({"name": "calm", "interventions": STEER}, 422, "invalid_shape"),
    ({"name": "calm", "interventions": [STEER], "version": 3}, 422, "invalid_shape"),
    ({"name": "calm", "interventions": [STEER], "description": "x" * 1001}, 422, "invalid_shape"),
    ({"name": "calm", "interventions": [STEER] * 65}, 400, "too_many_operations"),
    ({"name": "calm", "interventions": [{"op": "jump"}]}, 400, "unknown_operation"),
    ({"name": "calm", "interventions": [{**STEER, "at": "layers.9.output"}]}, 400, "unknown_layer"),
    ({"name": "calm", "interventions": [{**STEER, "at": "layers.1.moon"}]}, 400, "unknown_point"),
    ({"name": "calm", "interventions": [{**STEER, "vector": [1.0] * 7}]}, 400, "wrong_width"),
    ({"name": "calm", "interventions": [{**STEER, "vector": {"name": "none"}}]}, 400, "unknown_vector"),
    ({"name": "calm", "interventions": [{**STEER, "scale": 1e39}]}, 400, "not_finite"),
    ({"name": "calm", "interventions": [CAPTURE, CAPTURE]}, 400, "duplicate_name"),
    ({"name": "calm", "interventions": [TRACE, STEER]}, 400, "unsupported_combination"),
]


@pytest.mark.both_databases
async def test_bad_presets_are_refused_and_leave_nothing(server: Server, error_of: ErrorCheck) -> None:
    for body, status, code in BAD:
        for method in ("POST", "PUT"):
            error_of(await server.client.request(method, "/v1/presets", json=body), status, code)
    deep: Any = 1
    for _ in range(200):
        deep = [deep]
    nested = {"name": "calm", "interventions": [{**STEER, "vector": deep}]}
    error_of(await server.client.post("/v1/presets", json=nested), 400, "json_too_deep")
    large = {"name": "calm", "interventions": [{**STEER, "at": "x" * MAX_PRESET_BYTES}]}
    error_of(await server.client.post("/v1/presets", json=large), 413, "body_too_large")
    assert (await server.client.get("/v1/presets")).json()["data"] == []
    assert server.context.presets.used_bytes == 0
    assert (await make(server))["version"] == 1


@pytest.mark.both_databases
async def test_any_text_is_kept(server: Server, error_of: ErrorCheck) -> None:
    code = {**TRACE, "code": "save(x='\x00é')"}
    made = await make(server, code, description="é")
    assert (made["interventions"], made["description"]) == ([code], "é")
    assert (await server.client.get("/v1/presets/calm")).json() == made
    headers = {"content-type": "application/json"}
    sent = json.dumps({"name": "calm", "interventions": [STEER], "description": "\ud800"})
    error_of(await server.client.post("/v1/presets", content=sent, headers=headers), 400, "invalid_json")


async def test_what_depends_on_the_prompt_is_checked_with_the_prompt(server: Server) -> None:
    where = {"positions": [100], "phase": "prompt"}
    patch = {
        "op": "patch",
        "at": "layers.1.output",
        "values": [[1.0] * 8] * 2,
        "where": {"positions": [5, -9]},
    }
    lens = {"op": "logit_lens", "layers": "all", "top_k": 0, "targets": [" anything"]}
    seen = {**patch, "values": [[1.0] * 8] * 3, "where": {"images": [1, 0]}}
    await make(server, {**STEER, "where": where}, patch, lens, seen, {**STEER, "where": {"images": [3]}})


@pytest.mark.both_databases
async def test_all_vectors_of_an_operation_are_kept_with_their_versions(server: Server) -> None:
    body = {"name": "joy", "vectors": {str(layer): row.tolist() for layer, row in ROWS.items()}}
    first, _ = [(await server.client.post("/v1/vectors", json=body)).json() for _ in range(2)]
    made = await make(server, {**STEER, "vector": {"name": "joy@1", "layer": 2}}, name="one")
    kept = {"name": "joy@1", "id": first["id"], "layer": 2}
    assert made["interventions"][0]["vector"] == kept
    written = await generate(server, interventions=[{**STEER, "vector": {"name": "joy@1", "layer": 2}}])
    assert interventions_of(await generate(server, preset="one")) == interventions_of(written)
    several = {"op": "steer", "at": "layers.1.output", "mode": "project_out"}
    vectors = [{"vector": [1.0] * 8}, {"vector": {"name": "joy@1", "layer": 2}}, {"vector": {"name": "joy"}}]
    made = await make(server, several | {"vectors": vectors})
    numbers, older, newest = made["interventions"][0]["vectors"]
    assert (numbers, older) == ({"vector": [1.0] * 8}, {"vector": kept})
    assert newest["vector"]["name"] == "joy@2"
    (applied,) = (await generate(server, preset="calm"))["choices"][0]["interventions"]["applied"]
    assert [one["version"] for one in applied["vectors"]] == [1, 2]


@pytest.mark.both_databases
async def test_models_are_listed_with_presets_for_each_caller(tenants: Tenants) -> None:
    server = tenants.server
    operator = await tenants.headers("operator")
    acme, other = [await tenants.headers(name, *USER) for name in ("acme", "other")]
    plain = await tenants.headers("acme", Scope.COMPLETIONS)
    limited = await tenants.headers("acme", *USER, presets=("mine@1", "none"))
    await make(server, headers=acme, name="mine")
    await make(server, headers=acme, name="mine")
    await make(server, headers=operator, shared=True)
    expected = {"acme": ["calm", "mine"], "other": ["calm"], "plain": [], "limited": ["mine@1"]}
    for name, headers in (("acme", acme), ("other", other), ("plain", plain), ("limited", limited)):
        data = (await server.client.get("/v1/models", headers=headers)).json()["data"]
        assert [one["id"] for one in data] == [MODEL, *(f"{MODEL}:{one}" for one in expected[name])]
        for one in data[1:]:
            await generate(server, headers, model=one["id"])
        # As `client.models.retrieve` asks for one: what is not in the caller's list is not there.
        assert (await server.client.get("/v1/models/", headers=headers)).json()["data"] == data
        for model in (MODEL, "org/none", *(f"{MODEL}:{one}" for one in ("calm", "mine", "mine@1"))):
            answer = await server.client.get(f"/v1/models/{model}", headers=headers)
            listed = [one for one in data if one["id"] == model]
            assert answer.status_code == (200 if listed else 404)
            found = answer.json()
            assert [found] == listed or found["error"]["code"] == "model_not_found"


@pytest.mark.both_databases
async def test_a_key_limited_to_presets_intervenes_by_these_only(
    tenants: Tenants, error_of: ErrorCheck
) -> None:
    server, client = tenants.server, tenants.server.client
    acme = await tenants.headers("acme", *USER)
    limited = await tenants.headers("acme", *USER, Scope.CODE, presets=("calm", "brief@1"))
    for name in ("calm", "brief", "loud"):
        await make(server, headers=acme, name=name)
    for name in ("calm", "calm@1", "brief", "brief@1"):
        await generate(server, limited, preset=name)
        await generate(server, limited, model=f"{MODEL}:{name}")
    await generate(server, limited)
    await make(server, headers=acme, name="brief")
    coder = await tenants.headers("acme", *USER, Scope.CODE, tier=Tier.TRUSTED)
    with_code = await tenants.headers(
        "acme", *USER, Scope.CODE, tier=Tier.TRUSTED, presets=("calm", "calm@3")
    )
    for version in (2, 3):
        await make(server, TRACE, headers=coder, name="calm")
        answer = await client.post("/v1/completions", json={**PROMPT, "preset": "calm"}, headers=with_code)
        if version == 2:
            message = error_of(answer, 403, "preset_not_allowed")
            assert "calm@2, whose code needs a key that names this version" in message
        assert (version, answer.status_code) in {(2, 403), (3, 200)}
    refused: list[dict[str, Any]] = [
        {"preset": "brief"}, {"preset": "loud"}, {"model": f"{MODEL}:loud"}, {"interventions": [STEER]},
        {"preset": "calm@1", "interventions": [STEER]}, {"preset": ["calm@1", "loud"]}, {"preset": "calm"},
    ]  # fmt: skip
    calls = server.engine.num_calls
    for body in refused:
        answer = await client.post("/v1/completions", json={**PROMPT, **body}, headers=limited)
        assert "brief@1, calm" in error_of(answer, 403, "preset_not_allowed")
    by_header = {**limited, "x-nnsight-preset": "loud"}
    error_of(await client.post("/v1/completions", json=PROMPT, headers=by_header), 403, "preset_not_allowed")
    for method, path in (
        ("POST", "/v1/presets"), ("PUT", "/v1/presets"), ("DELETE", "/v1/presets/calm"),
        ("POST", "/v1/vectors"), ("POST", "/v1/vectors/train"), ("POST", "/v1/traces"), ("POST", "/v1/jobs"),
        ("POST", "/v1/detectors"), ("POST", "/v1/detectors/train"), ("POST", "/v1/sweeps"),
    ):  # fmt: skip
        answer = await client.request(method, path, json={}, headers=limited)
        error_of(answer, 403, "preset_not_allowed")
    assert server.engine.num_calls == calls
    assert (await client.get("/v1/presets/loud", headers=limited)).status_code == 200
    # So is the key that replaces it, and lists say so.
    keys = (await client.get("/v1/admin/keys", headers=await tenants.headers("operator"))).json()["data"]
    found = next(key for key in keys if key["presets"] == ["calm", "brief@1"])
    rotated = await server.context.keys.rotate(found["id"], 0)
    assert rotated.presets == ("calm", "brief@1")
    successor = {"authorization": f"Bearer {rotated.key}"}
    answer = await client.post("/v1/completions", json={**PROMPT, "preset": "loud"}, headers=successor)
    error_of(answer, 403, "preset_not_allowed")


async def test_keys_are_limited_to_presets_by_valid_names_and_not_with_admin(
    tenants: Tenants, error_of: ErrorCheck
) -> None:
    operator = await tenants.headers("operator")
    wrong: list[dict[str, Any]] = [
        {"presets": []}, {"presets": ["Calm"]}, {"presets": "calm"}, {"presets": ["calm@"]},
        {"presets": ["calm"] * 101}, {"presets": ["calm"], "scopes": ["admin"]},
    ]  # fmt: skip
    for more in wrong:
        body = {"tenant": "acme", **more}
        error_of(await tenants.send("POST", "/v1/admin/keys", operator, json=body), 422, "invalid_shape")


async def test_the_using_request_needs_the_scopes_of_the_operations(
    tenants: Tenants, error_of: ErrorCheck
) -> None:
    server, client = tenants.server, tenants.server.client
    coder = await tenants.headers("acme", *USER, Scope.CODE, tier=Tier.TRUSTED)
    acme = await tenants.headers("acme", *USER)
    plain = await tenants.headers("acme", Scope.COMPLETIONS)
    code = {"name": "code", "interventions": [TRACE]}
    error_of(await client.post("/v1/presets", json=code, headers=acme), 403, "missing_scope")
    await make(server, TRACE, headers=coder, name="code")
    await make(server, headers=acme)
    for headers, name in ((acme, "code"), (plain, "calm")):
        for body in ({"preset": name}, {"model": f"{MODEL}:{name}"}):
            answer = await client.post("/v1/completions", json={**PROMPT, **body}, headers=headers)
            error_of(answer, 403, "missing_scope")
    assert server.engine.num_calls == 0
    await generate(server, coder, preset="code")


async def test_presets_are_audited(tenants: Tenants) -> None:
    server = tenants.server
    operator, acme = await tenants.headers("operator"), await tenants.headers("acme", *USER)
    await make(server, headers=operator, shared=True)
    await make(server, headers=acme, name="mine")
    await generate(server, acme, model=f"{MODEL}:calm", preset="mine")
    await server.until_idle()
    await server.context.log.flush()
    page = await tenants.send("GET", "/v1/admin/audit", operator, params={"tenant": "acme"})
    used, made = page.json()["data"][:2]
    assert (used["model"], used["operations"]) == (MODEL, ["steer", "steer"])
    assert used["details"]["presets"] == ["calm@1", "mine@1"]
    assert (made["route"], made["subject"]) == ("/v1/presets", "mine@1")


@pytest.mark.parametrize(("route", "place"), [("/v1/messages", "body"), ("/v1/responses", "request")])
async def test_vllms_routes_take_presets_by_each_road(
    server: Server, error_of: ErrorCheck, route: str, place: str
) -> None:
    await make(server, STEER, CAPTURE)
    roads: list[tuple[dict[str, Any], dict[str, str]]] = [
        ({"model": MODEL, "preset": "calm"}, {}),
        ({"model": MODEL}, {"x-nnsight-preset": "calm"}),
        ({"model": f"{MODEL}:calm"}, {}),
    ]
    for body, headers in roads:
        answer = await server.client.post(route, json={**body, "max_tokens": 1}, headers=headers)
        assert answer.status_code == 200, answer.text
        passed = answer.json()[place]
        assert (passed["model"], "preset" in passed, "interventions" in passed) == (MODEL, False, False)
        operations, _ = server.engine.passed_on
        assert [one.op for one in operations] == ["steer", "capture"]
    unknown = await server.client.post(route, json={"model": MODEL, "preset": "none"})
    error_of(unknown, 404, "preset_not_found")


async def test_routes_of_vllm_without_operations_refuse_presets(server: Server, error_of: ErrorCheck) -> None:
    await make(server)
    for route in [one for one in VLLM_ROUTES if one.runs and not one.intervenes]:
        for more, headers in (({"preset": "calm"}, {}), ({}, {"x-nnsight-preset": "calm"})):
            answer = await server.client.post(route.path, json={"query": "a", **more}, headers=headers)
            error_of(answer, 400, "unsupported_combination")
