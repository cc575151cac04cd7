"""Detectors that are trained from prompts: which layer tells them apart, and what nothing is learned from."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest

from api_schemas.keys import Scope
from tests.fakes.engine import FakeBehaviour
from tests.integration.conftest import ErrorCheck, Serve, Server
from tests.integration.tenants import Tenants
from tests.integration.test_detectors import assert_nothing_stored, resolved
from tests.integration.test_vector_training import DOWN, PULLS, UP, frames
from tests.waiting import wait_for_async

TRAIN = {"name": "mood", "positive": UP, "negative": DOWN}
KINDS = ["linear", "mlp", "distance"]


@pytest.fixture
async def server(serve: Serve) -> AsyncIterator[Server]:
    async with serve(FakeBehaviour(pulls=PULLS)) as server:
        yield server


async def train(server: Server, headers: Any = None, **more: object) -> httpx.Response:
    return await server.client.post("/v1/detectors/train", json={**TRAIN, **more}, headers=headers)


async def trained(server: Server, **more: object) -> dict[str, Any]:
    answer = await train(server, **more)
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made


def values_of(words: list[str], layers: list[int]) -> dict[str, Any]:
    """Return what the fake model has at the last position of `say WORD`."""
    found = {}
    for layer in layers:
        rows = np.ones((len(words), 8), np.float32)
        rows[:, 0] += [PULLS[word][layer] for word in words]
        found[f"layers.{layer}.output"] = rows
    return found


@pytest.mark.parametrize("kind", KINDS)
async def test_the_layer_that_separates_the_sides_is_found(server: Server, kind: str) -> None:
    made = await trained(server, kind=kind)
    training = made["training"]
    assert (made["format"], made["version"], [part["at"] for part in made["parts"]]) == (
        "trained",
        1,
        ["layers.2.output"],
    )
    assert (training["num_positive"], training["num_negative"]) == (6, 6)
    assert (training["num_held_positive"], training["num_held_negative"]) == (2, 2)
    assert (training["layers"], training["auroc"]) == ([2], 1.0)
    assert [one["layer"] for one in training["tried"]] == [0, 1, 2, 3]
    assert made["link"] == ("identity" if kind == "distance" else "sigmoid")
    assert made["parts"][0]["hidden"] == training["hidden"] == (64 if kind == "mlp" else None)
    best = max(made["calibration"], key=lambda point: point["tpr"] - point["fpr"])
    assert best == {"threshold": made["threshold"], "tpr": 1.0, "fpr": 0.0}
    assert (await server.client.get(f"/v1/detectors/{made['id']}")).json() == made
    _, detector = await resolved(server, "mood")
    for words, is_above in ((UP, True), (DOWN, False)):
        scores = detector.scores(values_of([word.removeprefix("say ") for word in words], [2]))
        assert ((scores >= made["threshold"]) == is_above).all()
    # Of the prompts nothing is kept.
    content = (await server.client.get(f"/v1/detectors/{made['id']}/content")).content
    for word in (*UP, *DOWN):
        assert word not in str(made)
        assert word.encode() not in content


@pytest.mark.parametrize("kind", KINDS)
async def test_parts_of_several_layers_are_summed(server: Server, kind: str) -> None:
    made = await trained(server, kind=kind, layers=[-2, 1, 3], hidden=5)
    assert [part["at"] for part in made["parts"]] == [f"layers.{layer}.output" for layer in (1, 2, 3)]
    assert made["training"]["layers"] == [1, 2, 3]
    assert made["training"]["tried"] is None
    assert {part["hidden"] for part in made["parts"]} == {5 if kind == "mlp" else None}
    _, detector = await resolved(server, "mood")
    values = values_of(["up1", "up2", "down3", "down4"], [1, 2, 3])
    scores = detector.scores(values)
    assert scores[:2].min() > scores[2:].max()
    assert made["training"]["auroc"] == 1.0


async def test_the_content_of_a_trained_one_is_the_same_detector(server: Server) -> None:
    made = await trained(server, kind="mlp")
    content = (await server.client.get(f"/v1/detectors/{made['id']}/content")).content
    files = {"file": ("mood.safetensors", content)}
    again = (await server.client.post("/v1/detectors", files=files, data={"name": "mood"})).json()
    for key in ("sha256", "parts", "bias", "link", "threshold", "calibration"):
        assert again[key] == made[key]
    assert again["training"] is None


async def test_the_same_training_makes_the_same_detector(server: Server) -> None:
    for kind in KINDS:
        first, second, other = [await trained(server, kind=kind, seed=seed) for seed in (7, 7, 8)]
        assert first["sha256"] == second["sha256"] != other["sha256"]
        assert first["training"] == second["training"]
        assert first["calibration"] == second["calibration"]


async def test_positions_and_conversations(server: Server) -> None:
    assert (await trained(server, position="mean"))["training"]["position"] == "mean"
    assert (await trained(server, position=0, layers="2"))["training"]["layers"] == [2]
    chats = {
        side: [[{"role": "user", "content": text}] for text in prompts]
        for side, prompts in (("positive", UP), ("negative", DOWN))
    }
    assert (await trained(server, **chats))["training"]["layers"] == [2]
    unequal = await trained(server, negative=DOWN[:3], holdout=0.5)
    assert (unequal["training"]["num_negative"], unequal["training"]["num_held_negative"]) == (1, 2)


async def test_a_stream_reports_progress(server: Server, error_of: ErrorCheck) -> None:
    answer = await train(server, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *progress, last = frames(answer.text)
    assert [(one["stage"], one["done"], one["total"]) for one in progress] == [
        *(("capture", n, 16) for n in range(1, 17)),
        *(("fit", n, 4) for n in range(1, 5)),
    ]
    assert (last["type"], last["detector"]["training"]["layers"]) == ("detector", [2])
    error_of(await train(server, stream=True, layers="9"), 400, "unknown_layer")
    same = {"positive": ["a b", "b a"], "negative": ["a c", "c a"]}
    *_, failed = frames((await train(server, stream=True, **same)).text)
    assert failed["error"]["code"] == "training_failed"
    assert len((await server.client.get("/v1/detectors")).json()["data"]) == 1


async def test_what_nothing_is_learned_from_is_refused_and_leaves_nothing(
    server: Server, error_of: ErrorCheck
) -> None:
    bad: list[tuple[dict[str, Any], int, str]] = [
        *(
            ({"positive": ["a b", "b a"], "negative": ["a c", "c a"], "kind": kind}, 400, "training_failed")
            for kind in KINDS
        ),
        ({"positive": ["up1", "up1"]}, 400, "training_failed"),
        ({"positive": ["up1", "up2"], "negative": ["up2", "up3"]}, 400, "training_failed"),
        ({"positive": ["up1"]}, 422, "invalid_shape"),
        ({"positive": ["up1", 7]}, 422, "invalid_shape"),
        ({"kind": "magic"}, 422, "invalid_shape"),
        ({"hidden": 0}, 422, "invalid_shape"),
        ({"hidden": 513}, 422, "invalid_shape"),
        ({"holdout": 0.9}, 422, "invalid_shape"),
        ({"seed": -1}, 422, "invalid_shape"),
        ({"name": "Mood"}, 422, "invalid_shape"),
        ({"method": "pca"}, 422, "invalid_shape"),
        ({"layers": "worst"}, 400, "unknown_layer"),
        ({"layers": "9"}, 400, "unknown_layer"),
        ({"layers": [1, -3]}, 400, "invalid_value"),
        ({"layers": []}, 422, "invalid_shape"),
        ({"shared": True}, 401, "missing_api_key"),
        ({"positive": [f"{n}" for n in range(600)]}, 400, "invalid_value"),
    ]
    for more, status, code in bad:
        answer = await train(server, **more)
        assert answer.status_code == status, (more, answer.text)
        error_of(answer, status, code)
    for number in (float("nan"), float("inf")):
        server.engine.behaviour.pulls = {"up1": (number,) * 4}
        assert "not all numbers" in error_of(await train(server), 400, "training_failed")
    await assert_nothing_stored(server)
    assert server.engine.num_running == 0


async def test_best_passes_over_layers_that_say_nothing(server: Server, error_of: ErrorCheck) -> None:
    flat = {word: (0.0, pull[1], 0.0, 0.0) for word, pull in PULLS.items()}
    server.engine.behaviour.pulls = flat
    made = await trained(server)
    assert [one["layer"] for one in made["training"]["tried"]] == [1]
    error_of(await train(server, layers=[0, 1]), 400, "training_failed")


async def test_the_values_may_have_so_many_bytes(serve: Serve, error_of: ErrorCheck) -> None:
    async with serve(FakeBehaviour(pulls=PULLS), max_training_bytes=16 * 4 * 8 * 4 - 1) as server:
        error_of(await train(server), 400, "invalid_value")
        assert server.engine.num_calls == 0
        await trained(server, layers="1:4")


async def test_a_trained_detector_has_so_many_bytes(serve: Serve, error_of: ErrorCheck) -> None:
    async with serve(FakeBehaviour(pulls=PULLS), max_tensor_bytes=2 * 4 * 8 * 4) as server:
        error_of(await train(server, kind="mlp", hidden=9), 400, "tensor_too_large")
        error_of(await train(server, kind="mlp", hidden=3, layers=[0, 1, 2]), 400, "tensor_too_large")
        assert server.engine.num_calls == 0
        await trained(server, kind="mlp", hidden=8)
        await trained(server, kind="distance", layers="all")


async def test_a_prompt_that_the_engine_refuses_is_named(server: Server, error_of: ErrorCheck) -> None:
    answer = await train(server, negative=[*DOWN, "word " * 3000])
    error_of(answer, 400, "invalid_value")
    assert answer.json()["error"]["param"] == "negative.8"
    await server.until_idle()
    await assert_nothing_stored(server)


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
        await assert_nothing_stored(server)


async def test_trainings_of_vectors_and_detectors_take_turns(serve: Serve) -> None:
    async with serve(FakeBehaviour(pulls=PULLS, delay_s=0.02), max_queued_trainings=1) as server:
        answers = await asyncio.gather(
            train(server), server.client.post("/v1/vectors/train", json=TRAIN), train(server)
        )
        assert sorted(answer.status_code for answer in answers) == [201, 201, 429]


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
    path = "/v1/detectors/"
    error_of(await server.client.get(f"{path}{made['id']}", headers=other), 404, "detector_not_found")
    assert (await server.client.get(f"{path}{shared['id']}", headers=other)).json()["training"]
