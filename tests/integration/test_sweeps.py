"""``POST /v1/sweeps`` over the fake engine: its answer, its stream, its limits and its turns."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any, Final

import httpx
import numpy as np
import pytest

from api_schemas.administration import Scope
from api_schemas.errors import ApiError, ErrorCode
from app.admission.estimates import Estimate
from app.admission.rates import Admitted
from tests.fakes.engine import FakeBehaviour
from tests.integration.conftest import ErrorCheck, Serve, Server
from tests.integration.tenants import Tenants
from tests.integration.test_stored_kinds import VECTORS

PROMPTS: Final = [{"clean": "one two three", "corrupted": "one four three"}]
SWEEP: Final[dict[str, Any]] = {
    "method": "patch", "prompts": PROMPTS, "positions": "all", "metric": {"type": "logprob", "token": 1},
}  # fmt: skip
STEER: Final[dict[str, Any]] = {
    **SWEEP, "method": "steer", "positions": None, "vector": [1.0] * 8, "strengths": [1, 2],
}  # fmt: skip


async def sweep(server: Server, headers: Any = None, **more: object) -> httpx.Response:
    return await server.client.post("/v1/sweeps", json={**SWEEP, **more}, headers=headers)


def frames(text: str) -> list[Any]:
    parts = [part.removeprefix("data: ") for part in text.split("\n\n") if part]
    assert parts[-1] == "[DONE]"
    return [json.loads(part) for part in parts[:-1]]


def tensor(found: dict[str, Any]) -> Any:
    return np.frombuffer(base64.b64decode(found["data"]), "<f4").reshape(found["shape"])


async def test_the_answer_is_one_labelled_tensor(server: Server) -> None:
    answer = await sweep(server)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["dims"] == ["layer", "position"]
    assert found["coords"] == {"layer": [0, 1, 2, 3], "position": [0, 1, 2]}
    assert (tensor(found["values"]) == np.full((4, 3), -0.5)).all()
    assert found["baselines"] == [{"clean": -0.5, "corrupted": -0.5, "unsteered": -0.5}]
    assert found["tokens"] == [[" one", " four", " three"]]
    assert (found["control"], found["num_failed"], found["failed"]) == (None, 0, [])
    assert server.engine.num_calls == 3  # two runs without interventions, and one batch


async def test_points_of_other_names_for_one_place(server: Server) -> None:
    several = ["layers.{layer}.output", "layers.{layer}.input"]
    found = (await sweep(server, points=several, layers=[1, 2])).json()
    assert (found["dims"], found["coords"]["point"]) == (["point", "layer", "position"], several)
    found = (await sweep(server, points=["layers.-1.output"])).json()
    assert (found["dims"], found["values"]["shape"]) == (["position"], [3])


async def test_large_captures_are_several_requests(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = (await sweep(server)).json()
    num_calls = server.engine.num_calls
    monkeypatch.setattr("app.services.sweeps.writes._CAPTURED_BYTES", 2 * 8 * 4)
    assert (await sweep(server)).json() == whole
    # One for each of four layers at two positions, then at the third; one of the other prompt; one batch.
    assert server.engine.num_calls == num_calls + 8 + 2


async def test_a_control_and_every_metric(server: Server) -> None:
    found = (await sweep(server, **STEER, control=True)).json()
    assert (found["dims"], found["values"]["shape"], found["control"]["shape"]) == (
        ["layer", "strength"], [4, 2], [4, 2],
    )  # fmt: skip
    probe = {"type": "probe", "at": "layers.1.output", "weights": [1.0] * 8}
    difference = {"type": "logit_difference", "token": 1, "other": 2}
    for metric, value in ((probe, 0.2), (difference, 0.5)):
        found = (await sweep(server, **{**STEER, "metric": metric})).json()
        assert tensor(found["values"]) == pytest.approx(value)


async def test_a_stream_reports_progress(server: Server, error_of: ErrorCheck) -> None:
    more = {"prompts": [*PROMPTS] * 30, "positions": [0, 1], "stream": True}
    answer = await sweep(server, **more)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *progress, last = frames(answer.text)
    assert [one["total"] for one in progress] == [240] * 4
    done = [one["done"] for one in progress]
    assert (sorted(set(done)), done[0], done[-1]) == (done, 64, 240)
    assert progress[-1]["seconds_left"] == 0
    assert (last["type"], last["sweep"]["dims"]) == ("sweep", ["prompt", "layer", "position"])
    assert last.keys() == {"type", "sweep"}
    whole = (await sweep(server, **{**STEER, "prompts": [{"clean": "one two"}]})).json()
    assert (whole["baselines"][0]["corrupted"], whole["control"]) == (None, None)
    streamed = await sweep(server, **{**STEER, "prompts": [{"clean": "one two"}], "stream": True})
    assert frames(streamed.text)[-1]["sweep"] == whole
    error_of(await sweep(server, stream=True, layers="9"), 400, "unknown_layer")


async def test_large_tensors_are_in_a_file(serve: Serve) -> None:
    async with serve(inline_tensor_bytes=47) as server:
        link = (await sweep(server)).json()["values"]
        assert (link["format"], link["key"], link["shape"]) == ("safetensors", "values/tensor", [4, 3])
        assert (await server.client.get(link["url"])).status_code == 200


REFUSED: Final[list[tuple[dict[str, Any], int, str, str | None]]] = [
    ({"prompts": [{"clean": "a b"}]}, 400, "invalid_value", "prompts.0.corrupted"),
    ({"prompts": [{"clean": "a b", "corrupted": "a"}]}, 400, "invalid_value", "prompts.0.corrupted"),
    ({"prompts": [{"clean": " ", "corrupted": "a"}]}, 400, "invalid_value", "prompts.0.clean"),
    ({"prompts": [{"clean": "a " * 2048, "corrupted": "a " * 2048}]}, 400, "invalid_value", "prompts.0"),
    ({"layers": "9"}, 400, "unknown_layer", "layers"),
    ({"points": ["layers.{layer}.magic"]}, 400, "unknown_point", "points.0"),
    ({"heads": "all"}, 400, "unsupported_at_point", "heads"),
    ({"positions": [5]}, 400, "position_out_of_range", "positions.0"),
    ({"metric": {"type": "detector", "detector": "none"}}, 400, "unknown_detector", "metric.detector"),
    (
        {"metric": {"type": "probe", "at": "layers.*.output", "weights": [1.0] * 8}},
        400,
        "invalid_value",
        "metric.at",
    ),
    ({**STEER, "vector": "none"}, 400, "unknown_vector", "vector"),
    ({"model": "other"}, 404, "model_not_found", "model"),
    ({"method": "magic"}, 422, "invalid_shape", None),
    ({"magic": 1}, 422, "invalid_shape", None),
]


async def test_what_is_refused_names_its_field_and_leaves_nothing_running(
    server: Server, error_of: ErrorCheck
) -> None:
    for more, status, code, param in REFUSED:
        answer = await sweep(server, **more)
        assert answer.status_code == status, (more, answer.text)
        error_of(answer, status, code)
        assert param is None or answer.json()["error"]["param"] == param, answer.text
    await server.until_idle()
    assert server.engine.num_running == 0


async def test_an_unknown_model_is_refused_before_the_queue(server: Server, error_of: ErrorCheck) -> None:
    num_calls = server.engine.num_calls
    error_of(await sweep(server, model="other"), 404, "model_not_found")
    assert server.engine.num_calls == num_calls


async def test_a_refused_where_is_named_as_it_was_sent(
    server: Server, error_of: ErrorCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = type(server.engine).completions

    async def refusing(engine: Any, body: Any, operations: Any, http: Any, **more: Any) -> Any:
        if operations[0].op == "steer":
            raise ApiError(ErrorCode.POSITION_OUT_OF_RANGE, "beyond", "interventions.0.where.positions.1")
        return await plain(engine, body, operations, http, **more)

    monkeypatch.setattr(type(server.engine), "completions", refusing)
    where: dict[str, Any] = {"where": {"positions": [0, 9]}}
    for more, param in ((where, "where.positions.1"), ({"positions": [0]}, "positions")):
        answer = await sweep(server, **{**STEER, **more})
        error_of(answer, 400, "position_out_of_range")
        assert answer.json()["error"]["param"] == param


async def test_a_sweep_has_so_many_cells_and_bytes(serve: Serve, error_of: ErrorCheck) -> None:
    async with serve(max_sweep_cells=11, max_sweep_bytes=4 * 3 * 8 * 4 - 1) as server:
        assert "4 layers × 3 positions" in error_of(await sweep(server), 400, "invalid_value")
        error_of(await sweep(server, positions=None), 400, "invalid_value")
        assert server.engine.num_calls == 0
        assert (await sweep(server, positions=[0, 1])).status_code == 200
        control = {**STEER, "layers": [0, 1, 2], "control": True}
        error_of(await sweep(server, **control), 400, "invalid_value")


async def test_a_cell_writes_no_more_than_a_request_may(serve: Serve, error_of: ErrorCheck) -> None:
    async with serve(max_tensor_bytes=3 * 8 * 4 - 1) as server:
        error_of(await sweep(server, positions=None), 400, "tensor_too_large")
        assert (await sweep(server)).status_code == 200


async def test_a_cell_that_fails_is_nan_and_says_why(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve() as server:
        plain = type(server.engine).completions

        async def failing(engine: Any, body: Any, operations: Any, http: Any, **more: Any) -> Any:
            if any(getattr(one, "scale", None) == 2 for one in operations):
                raise ApiError(ErrorCode.NOT_FINITE, "too large", "interventions.0.scale")
            return await plain(engine, body, operations, http, **more)

        monkeypatch.setattr(type(server.engine), "completions", failing)
        found = (await sweep(server, **STEER)).json()
        assert np.isnan(tensor(found["values"])[:, 1]).all()
        assert (tensor(found["values"])[:, 0] == -0.5).all()
        assert found["num_failed"] == 4
        assert found["failed"][0] == {
            "index": [0, 1], "control": False, "code": "not_finite", "message": "too large",
        }  # fmt: skip


async def test_a_batch_without_room_is_tried_again(
    serve: Serve, error_of: ErrorCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.services.sweeps.run._PAUSES_S", (0.0, 0.0))
    async with serve() as server:
        plain, num_failures = type(server.engine).completions, 0

        async def full(*given: Any, **more: Any) -> Any:
            nonlocal num_failures
            if num_failures:
                num_failures -= 1
                raise ApiError(ErrorCode.ENGINE_CAPTURE_FULL, "full")
            return await plain(*given, **more)

        monkeypatch.setattr(type(server.engine), "completions", full)
        num_failures = 2
        found = (await sweep(server, **STEER)).json()
        assert (found["num_failed"], num_failures) == (0, 0)
        num_failures = 1000
        error_of(await sweep(server, **STEER), 503, "engine_capture_full")


async def test_a_client_that_leaves_ends_its_sweep(serve: Serve) -> None:
    async with serve(FakeBehaviour(delay_s=0.2)) as server:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await sweep(server, stream=True)
        await server.until_idle()
        num_calls = server.engine.num_calls
        await asyncio.sleep(0.4)
        assert (server.engine.num_calls, server.engine.num_running) == (num_calls, 0)
        assert (await sweep(server)).status_code == 200  # its place is free


async def test_two_run_at_a_time_and_others_wait(serve: Serve, error_of: ErrorCheck) -> None:
    async with serve(FakeBehaviour(delay_s=0.05), max_queued_sweeps=1) as server:
        answers = await asyncio.gather(*(sweep(server) for _ in range(4)))
        assert sorted(answer.status_code for answer in answers) == [200, 200, 200, 429]
        error_of(next(one for one in answers if one.status_code == 429), 429, "queue_full")


async def test_tokens_are_reserved_when_the_turn_comes(
    tenants: Tenants, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, plain, num_calls = tenants.server.engine, Admitted.reserve, list[int]()
    headers = await tenants.headers("acme", Scope.COMPLETIONS, Scope.INTERVENTIONS)

    async def noted(admitted: Admitted, estimate: Estimate) -> None:
        num_calls.append(engine.num_calls - begun)
        await plain(admitted, estimate)

    monkeypatch.setattr(Admitted, "reserve", noted)
    monkeypatch.setattr(engine.behaviour, "delay_s", 0.05)
    begun = engine.num_calls
    answers = await asyncio.gather(*(sweep(tenants.server, headers) for _ in range(2)))
    assert [answer.status_code for answer in answers] == [200, 200]
    assert num_calls == [0, 3]  # a tenant has one turn at a time, and a sweep three requests here


async def test_scopes_names_of_the_tenant_and_quotas(tenants: Tenants, error_of: ErrorCheck) -> None:
    server = tenants.server
    error_of(await sweep(server, await tenants.headers("acme", Scope.INTERVENTIONS)), 403, "missing_scope")
    error_of(await sweep(server, await tenants.headers("acme", Scope.COMPLETIONS)), 403, "missing_scope")
    ours, theirs = [
        await tenants.headers(name, Scope.COMPLETIONS, Scope.INTERVENTIONS) for name in ("acme", "rival")
    ]
    made = await VECTORS.make(server, ours, name="calm")
    named = {**STEER, "vector": "calm", "layers": made["layers"]}
    assert (await sweep(server, ours, **named)).status_code == 200
    error_of(await sweep(server, theirs, **named), 400, "unknown_vector")
    # Two runs and twelve cells of four tokens are 56.
    both, limits = (Scope.COMPLETIONS, Scope.INTERVENTIONS), {"tokens_per_minute": 55}
    small = await tenants.headers("small", *both, limits=limits)
    calls = server.engine.num_calls
    error_of(await sweep(server, small), 400, "request_beyond_limit")
    assert server.engine.num_calls == calls
    assert (await sweep(server, small, positions=[0, 1])).status_code == 200
