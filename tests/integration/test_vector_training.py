"""Vectors that are trained from prompts: which layer tells them apart, and what nothing is learned from."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest

from api_schemas.keys import Scope
from tests.fakes.engine import FakeBehaviour
from tests.integration.conftest import ErrorCheck, Serve, Server
from tests.integration.tenants import Tenants
from tests.integration.test_vectors import content_of
from tests.waiting import wait_for_async

# At layer 2 the words' sides lie apart, and at the others on one another.
PULLS = {
    **{f"up{n}": (n % 2 - 0.5, float(n % 4), 5.0 + n / 8, (-1.0) ** n * n) for n in range(8)},
    **{f"down{n}": (n % 2 - 0.4, n % 4 + 0.1, -5.0 - n / 8, (-1.0) ** n * n + 0.1) for n in range(8)},
}
UP = [f"say up{n}" for n in range(8)]
DOWN = [f"say down{n}" for n in range(8)]
TRAIN = {"name": "mood", "positive": UP, "negative": DOWN}


@pytest.fixture
async def server(serve: Serve) -> AsyncIterator[Server]:
    async with serve(FakeBehaviour(pulls=PULLS)) as server:
        yield server


async def train(server: Server, headers: Any = None, **more: object) -> httpx.Response:
    return await server.client.post("/v1/vectors/train", json={**TRAIN, **more}, headers=headers)


async def trained(server: Server, **more: object) -> dict[str, Any]:
    answer = await train(server, **more)
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made


@pytest.mark.parametrize("method", ["mean_difference", "pca", "logistic"])
async def test_the_layer_that_separates_the_sides_is_found(server: Server, method: str) -> None:
    made = await trained(server, method=method)
    training = made["training"]
    assert (made["format"], made["layers"], made["version"]) == ("trained", [0, 1, 2, 3], 1)
    assert (training["num_positive"], training["num_negative"], training["num_held_out"]) == (6, 6, 4)
    assert [one["layer"] for one in training["layers"]] == [0, 1, 2, 3]
    assert training["best_layer"] == 2
    best = training["layers"][2]
    assert (best["auroc"], best["accuracy"]) == (1.0, 1.0)
    assert best["separation"] > 5
    assert max(one["separation"] for one in training["layers"] if one["layer"] != 2) < 5
    rows = await content_of(server, made["id"])
    direction = rows["layers.2.output"] / best["norm"]
    np.testing.assert_allclose(direction, [1, 0, 0, 0, 0, 0, 0, 0], atol=1e-6)
    assert (await server.client.get(f"/v1/vectors/{made['id']}")).json() == made
    applied = {"op": "steer", "at": "layers.2.output", "vector": {"name": "mood"}}
    assert (await server.complete(interventions=[applied])).status_code == 200


async def test_the_same_training_makes_the_same_vector(server: Server) -> None:
    first, second, other = [await trained(server, seed=seed) for seed in (7, 7, 8)]
    assert first["sha256"] == second["sha256"] != other["sha256"]
    assert first["training"] == second["training"]
    assert (first["version"], second["version"]) == (1, 2)


async def test_layers_and_positions_are_chosen(server: Server) -> None:
    for layers, found in (("1:3", [1, 2]), ([2, -1], [2, 3]), ("2", [2]), ("all", [0, 1, 2, 3])):
        assert (await trained(server, layers=layers))["layers"] == found
    assert (await trained(server, position="mean"))["training"]["position"] == "mean"
    assert (await trained(server, position=0))["training"]["position"] == 0
    chats = {
        side: [[{"role": "user", "content": text}] for text in prompts]
        for side, prompts in (("positive", UP), ("negative", DOWN))
    }
    assert (await trained(server, **chats))["training"]["best_layer"] == 2


def frames(text: str) -> list[Any]:
    parts = [part.removeprefix("data: ") for part in text.split("\n\n") if part]
    assert parts[-1] == "[DONE]"
    return [json.loads(part) for part in parts[:-1]]


async def test_a_stream_reports_progress(server: Server, error_of: ErrorCheck) -> None:
    answer = await train(server, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *progress, last = frames(answer.text)
    assert [(one["stage"], one["done"], one["total"]) for one in progress] == [
        *(("capture", n, 16) for n in range(1, 17)),
        *(("fit", n, 4) for n in range(1, 5)),
    ]
    assert (last["type"], last["vector"]["training"]["best_layer"]) == ("vector", 2)
    error_of(await train(server, stream=True, layers="9"), 400, "unknown_layer")
    same = {"positive": ["a b", "b a"], "negative": ["a c", "c a"]}
    *_, failed = frames((await train(server, stream=True, **same)).text)
    assert failed["error"]["code"] == "training_failed"
    assert len((await server.client.get("/v1/vectors")).json()["data"]) == 1


async def test_what_nothing_is_learned_from_is_refused_and_leaves_nothing(
    server: Server, error_of: ErrorCheck
) -> None:
    bad: list[tuple[dict[str, Any], int, str]] = [
        ({"positive": ["a b", "b a"], "negative": ["a c", "c a"]}, 400, "training_failed"),
        ({"positive": ["up1", "up1"]}, 400, "training_failed"),
        ({"positive": ["up1", "up2"], "negative": ["up2", "up3"]}, 400, "training_failed"),
        ({"positive": []}, 422, "invalid_shape"),
        ({"positive": ["up1"]}, 422, "invalid_shape"),
        ({"positive": ["up1", ""]}, 422, "invalid_shape"),
        ({"positive": ["up1", 7]}, 422, "invalid_shape"),
        ({"positive": "up1"}, 422, "invalid_shape"),
        ({"positive": UP[:3], "method": "pca"}, 422, "invalid_shape"),
        ({"method": "magic"}, 422, "invalid_shape"),
        ({"holdout": 0}, 422, "invalid_shape"),
        ({"holdout": 0.9}, 422, "invalid_shape"),
        ({"seed": -1}, 422, "invalid_shape"),
        ({"position": "last"}, 422, "invalid_shape"),
        ({"name": "Mood"}, 422, "invalid_shape"),
        ({"layers": "9"}, 400, "unknown_layer"),
        ({"layers": "2:1"}, 400, "unknown_layer"),
        ({"layers": [1, -3]}, 400, "invalid_value"),
        ({"layers": []}, 422, "invalid_shape"),
        ({"shared": True}, 401, "missing_api_key"),
        ({"positive": [f"{n}" for n in range(600)]}, 400, "invalid_value"),
    ]
    for more, status, code in bad:
        answer = await train(server, **more)
        assert answer.status_code == status, (more, answer.text)
        error_of(answer, status, code)
    server.engine.behaviour.pulls = {"up1": (float("nan"),) * 4}
    assert "not all numbers" in error_of(await train(server), 400, "training_failed")
    server.engine.behaviour.pulls = {"up1": (float("inf"),) * 4}
    error_of(await train(server), 400, "training_failed")
    assert (await server.client.get("/v1/vectors")).json()["data"] == []
    assert server.engine.num_running == 0


async def test_the_values_may_have_so_many_bytes(serve: Serve, error_of: ErrorCheck) -> None:
    async with serve(FakeBehaviour(pulls=PULLS), max_training_bytes=16 * 4 * 8 * 4 - 1) as server:
        error_of(await train(server), 400, "invalid_value")
        assert server.engine.num_calls == 0
        await trained(server, layers="1:4")


async def test_large_values_leave_no_files(serve: Serve) -> None:
    async with serve(FakeBehaviour(pulls=PULLS), inline_tensor_bytes=1, result_store_bytes=0) as server:
        assert (await trained(server))["training"]["best_layer"] == 2


async def test_a_prompt_that_the_engine_refuses_is_named(server: Server, error_of: ErrorCheck) -> None:
    long = "word " * 3000
    answer = await train(server, negative=[*DOWN, long])
    assert "room for" in error_of(answer, 400, "invalid_value")
    assert answer.json()["error"]["param"] == "negative.8"
    await server.until_idle()
    assert server.engine.num_running == 0


async def test_a_client_that_leaves_ends_its_training(serve: Serve) -> None:
    async with serve(FakeBehaviour(pulls=PULLS, delay_s=0.2)) as server:
        for stream in (False, True):
            before = server.engine.num_calls
            leaving = asyncio.create_task(train(server, stream=stream))
            await wait_for_async(lambda: server.engine.num_calls > before)  # noqa: B023 - awaited here
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            await server.until_idle()
            assert server.engine.num_running == 0
            assert 0 < server.engine.num_calls - before < 17
        assert (await server.client.get("/v1/vectors")).json()["data"] == []
        server.engine.behaviour.delay_s = 0.0
        await trained(server)


async def test_one_training_runs_at_a_time_and_others_wait(serve: Serve) -> None:
    async with serve(FakeBehaviour(pulls=PULLS, delay_s=0.02), max_queued_trainings=1) as server:
        answers = await asyncio.gather(*(train(server) for _ in range(3)))
        assert sorted(answer.status_code for answer in answers) == [201, 201, 429]
        assert (await train(server)).status_code == 201


async def test_a_tenant_that_trains_much_keeps_no_other_waiting_long(
    serve: Serve, error_of: ErrorCheck
) -> None:
    async with serve(FakeBehaviour(pulls=PULLS, delay_s=0.1), max_queued_trainings=6) as server:
        tenants = Tenants(server)
        ours, theirs = await tenants.headers("acme"), await tenants.headers("rival")
        for headers in (ours, theirs):  # a key that is seen for the first time waits for others to be read
            assert (await server.client.get("/v1/vectors", headers=headers)).status_code == 200
        ended: list[str] = []

        async def one(whose: str, headers: dict[str, str]) -> int:
            answer = await train(server, headers)
            if answer.status_code == 429:
                assert "The tenant 'acme' may have 3 queued trainings" in error_of(answer, 429, "queue_full")
            else:
                ended.append(whose)
            return answer.status_code

        asked = [asyncio.create_task(one("acme", ours)) for _ in range(6)]
        await asyncio.sleep(0.02)
        asked.append(asyncio.create_task(one("rival", theirs)))
        assert sorted(await asyncio.gather(*asked)) == [201] * 5 + [429] * 2
        assert ended.index("rival") <= 2  # behind the one that runs and one whose turn it was


async def test_scopes_and_tenants(tenants: Tenants, error_of: ErrorCheck) -> None:
    server = tenants.server
    server.engine.behaviour.pulls = PULLS
    steering = await tenants.headers("acme", Scope.INTERVENTIONS)
    error_of(await train(server, steering), 403, "missing_scope")
    both = await tenants.headers("acme", Scope.INTERVENTIONS, Scope.COMPLETIONS)
    made = (await train(server, both)).json()
    assert made["own"]
    error_of(await train(server, both, shared=True), 403, "missing_scope")
    operator = await tenants.headers("operator")
    shared = (await train(server, operator, shared=True)).json()
    other = await tenants.headers("other")
    error_of(await server.client.get(f"/v1/vectors/{made['id']}", headers=other), 404, "vector_not_found")
    assert (await server.client.get(f"/v1/vectors/{shared['id']}", headers=other)).json()["training"]
