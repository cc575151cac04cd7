"""Vectors and detectors trained from prompts: what is found, and what nothing is learned from."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, Final

import httpx
import numpy as np
import pytest

from api_schemas.administration import Scope
from tests.fakes.engine import FakeBehaviour
from tests.integration.conftest import ErrorCheck, Serve, Server
from tests.integration.tenants import Tenants
from tests.integration.test_detectors import resolved
from tests.integration.test_vectors import content_of

# At layer 2 the words' sides lie apart, and at the others on one another.
PULLS: Final = {
    **{f"up{n}": (n % 2 - 0.5, float(n % 4), 5.0 + n / 8, (-1.0) ** n * n) for n in range(8)},
    **{f"down{n}": (n % 2 - 0.4, n % 4 + 0.1, -5.0 - n / 8, (-1.0) ** n * n + 0.1) for n in range(8)},
}
UP: Final = [f"say up{n}" for n in range(8)]
DOWN: Final = [f"say down{n}" for n in range(8)]
TRAIN: Final = {"name": "mood", "positive": UP, "negative": DOWN}
SAME: Final = {"positive": ["a b", "b a"], "negative": ["a c", "c a"]}
METHODS: Final = ["mean_difference", "pca", "logistic"]
FORMS: Final = ["linear", "mlp", "distance"]
EVERY: Final = [
    *(("vectors", {"method": one}) for one in METHODS),
    *(("detectors", {"kind": one}) for one in FORMS),
]
both_kinds = pytest.mark.parametrize("what", ["vectors", "detectors"])


@pytest.fixture
async def server(serve: Serve) -> AsyncIterator[Server]:
    async with serve(FakeBehaviour(pulls=PULLS)) as server:
        yield server


async def train(
    server: Server, what: str = "detectors", headers: Any = None, **more: object
) -> httpx.Response:
    return await server.client.post(f"/v1/{what}/train", json={**TRAIN, **more}, headers=headers)


async def trained(server: Server, what: str = "detectors", **more: object) -> dict[str, Any]:
    answer = await train(server, what, **more)
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made


async def assert_nothing_stored(server: Server) -> None:
    for what in ("vectors", "detectors"):
        assert (await server.client.get(f"/v1/{what}")).json()["data"] == []


def best_of(made: dict[str, Any]) -> list[int]:
    """Return the layers that a training found to be the best."""
    training = made["training"]
    return training["layers"] if "auroc" in training else [training["best_layer"]]


def values_of(words: list[str], layers: list[int]) -> dict[str, Any]:
    """Return what the fake model has at the last position of `say WORD`."""
    found = {}
    for layer in layers:
        rows = np.ones((len(words), 8), np.float32)
        rows[:, 0] += [PULLS[word.removeprefix("say ")][layer] for word in words]
        found[f"layers.{layer}.output"] = rows
    return found


def frames(text: str) -> list[Any]:
    parts = [part.removeprefix("data: ") for part in text.split("\n\n") if part]
    assert parts[-1] == "[DONE]"
    return [json.loads(part) for part in parts[:-1]]


@pytest.mark.parametrize("method", METHODS)
async def test_a_vector_points_to_the_side_that_is_meant(server: Server, method: str) -> None:
    made = await trained(server, "vectors", method=method)
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


@pytest.mark.parametrize("kind", FORMS)
async def test_a_detector_tells_the_sides_apart(server: Server, kind: str) -> None:
    made = await trained(server, kind=kind)
    training = made["training"]
    parts = [part["at"] for part in made["parts"]]
    assert (made["format"], made["version"], parts) == ("trained", 1, ["layers.2.output"])
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
        assert ((detector.scores(values_of(words, [2])) >= made["threshold"]) == is_above).all()
    # Of the prompts nothing is kept, and the numbers are all that there is.
    content = (await server.client.get(f"/v1/detectors/{made['id']}/content")).content
    for word in (*UP, *DOWN):
        assert word not in str(made)
        assert word.encode() not in content
    files = {"file": ("mood.safetensors", content)}
    again = (await server.client.post("/v1/detectors", files=files, data={"name": "mood"})).json()
    for key in ("sha256", "parts", "bias", "link", "threshold", "calibration"):
        assert again[key] == made[key]
    assert again["training"] is None


@pytest.mark.parametrize(("what", "how"), EVERY)
async def test_the_same_training_makes_the_same_numbers(
    server: Server, what: str, how: dict[str, str]
) -> None:
    first, second, other = [await trained(server, what, **how, seed=seed) for seed in (7, 7, 8)]
    assert first["sha256"] == second["sha256"] != other["sha256"]
    for key in ("training", "calibration"):
        assert first.get(key) == second.get(key)


@both_kinds
async def test_layers_positions_and_conversations(server: Server, what: str) -> None:
    assert (await trained(server, what, position="mean"))["training"]["position"] == "mean"
    made = await trained(server, what, position=0, layers="2")
    assert (best_of(made), made["training"]["position"]) == ([2], 0)
    chats = {
        side: [[{"role": "user", "content": text}] for text in prompts]
        for side, prompts in (("positive", UP), ("negative", DOWN))
    }
    assert best_of(await trained(server, what, **chats)) == [2]
    if what == "vectors":
        for layers, found in (("1:3", [1, 2]), ([2, -1], [2, 3]), ("all", [0, 1, 2, 3])):
            assert (await trained(server, what, layers=layers))["layers"] == found
    else:
        unequal = (await trained(server, negative=DOWN[:3], holdout=0.5))["training"]
        assert (unequal["num_negative"], unequal["num_held_negative"]) == (1, 2)


@both_kinds
async def test_a_stream_reports_progress(server: Server, error_of: ErrorCheck, what: str) -> None:
    answer = await train(server, what, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *progress, last = frames(answer.text)
    assert [(one["stage"], one["done"], one["total"]) for one in progress] == [
        *(("capture", n, 16) for n in range(1, 17)),
        *(("fit", n, 4) for n in range(1, 5)),
    ]
    one = what.removesuffix("s")
    assert (last["type"], best_of(last[one])) == (one, [2])
    error_of(await train(server, what, stream=True, layers="9"), 400, "unknown_layer")
    *_, failed = frames((await train(server, what, stream=True, **SAME)).text)
    assert failed["error"]["code"] == "training_failed"
    assert len((await server.client.get(f"/v1/{what}")).json()["data"]) == 1


OF_BOTH: Final[list[tuple[dict[str, Any], int, str]]] = [
    (SAME, 400, "training_failed"),
    ({"positive": ["up1", "up1"]}, 400, "training_failed"),
    ({"positive": ["up1", "up2"], "negative": ["up2", "up3"]}, 400, "training_failed"),
    ({"positive": ["up1"]}, 422, "invalid_shape"),
    ({"positive": ["up1", ""]}, 422, "invalid_shape"),
    ({"positive": ["up1", 7]}, 422, "invalid_shape"),
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
OF_ONE: Final[dict[str, list[tuple[dict[str, Any], int, str]]]] = {
    "vectors": [
        ({"positive": UP[:3], "method": "pca"}, 422, "invalid_shape"),
        ({"method": "magic"}, 422, "invalid_shape"),
    ],
    "detectors": [
        *(({**SAME, "kind": kind}, 400, "training_failed") for kind in FORMS),
        ({"kind": "magic"}, 422, "invalid_shape"),
        ({"hidden": 0}, 422, "invalid_shape"),
        ({"hidden": 513}, 422, "invalid_shape"),
        ({"method": "pca"}, 422, "invalid_shape"),
        ({"layers": "worst"}, 400, "unknown_layer"),
    ],
}


@both_kinds
async def test_what_nothing_is_learned_from_is_refused_and_leaves_nothing(
    server: Server, error_of: ErrorCheck, what: str
) -> None:
    for more, status, code in [*OF_BOTH, *OF_ONE[what]]:
        answer = await train(server, what, **more)
        assert answer.status_code == status, (more, answer.text)
        error_of(answer, status, code)
    refused = await train(server, what, negative=[*DOWN, "word " * 3000])
    assert "room for" in error_of(refused, 400, "invalid_value")
    assert refused.json()["error"]["param"] == "negative.8"
    for number in (float("nan"), float("inf")):
        server.engine.behaviour.pulls = {"up1": (number,) * 4}
        assert "not all numbers" in error_of(await train(server, what), 400, "training_failed")
    await server.until_idle()
    await assert_nothing_stored(server)
    assert server.engine.num_running == 0


async def test_best_passes_over_layers_that_say_nothing(server: Server, error_of: ErrorCheck) -> None:
    flat = {word: (0.0, pull[1], 0.0, 0.0) for word, pull in PULLS.items()}
    server.engine.behaviour.pulls = flat
    made = await trained(server)
    assert [one["layer"] for one in made["training"]["tried"]] == [1]
    error_of(await train(server, layers=[0, 1]), 400, "training_failed")


@both_kinds
async def test_the_values_may_have_so_many_bytes(serve: Serve, error_of: ErrorCheck, what: str) -> None:
    async with serve(FakeBehaviour(pulls=PULLS), max_training_bytes=16 * 4 * 8 * 4 - 1) as server:
        error_of(await train(server, what), 400, "invalid_value")
        assert server.engine.num_calls == 0
        await trained(server, what, layers="1:4")


async def test_a_trained_detector_has_so_many_bytes(serve: Serve, error_of: ErrorCheck) -> None:
    async with serve(FakeBehaviour(pulls=PULLS), max_tensor_bytes=2 * 4 * 8 * 4) as server:
        error_of(await train(server, kind="mlp", hidden=9), 400, "tensor_too_large")
        error_of(await train(server, kind="mlp", hidden=3, layers=[0, 1, 2]), 400, "tensor_too_large")
        assert server.engine.num_calls == 0
        await trained(server, kind="mlp", hidden=8)
        await trained(server, kind="distance", layers="all")


async def test_large_values_leave_no_files(serve: Serve) -> None:
    async with serve(FakeBehaviour(pulls=PULLS), inline_tensor_bytes=1, result_store_bytes=0) as server:
        assert best_of(await trained(server)) == [2]


async def test_one_training_runs_at_a_time_and_others_wait(serve: Serve) -> None:
    async with serve(FakeBehaviour(pulls=PULLS, delay_s=0.02), max_queued_trainings=1) as server:
        answers = await asyncio.gather(train(server), train(server, "vectors"), train(server))
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
            answer = await train(server, "vectors", headers)
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


@both_kinds
async def test_scopes_and_tenants(tenants: Tenants, error_of: ErrorCheck, what: str) -> None:
    server = tenants.server
    server.engine.behaviour.pulls = PULLS
    steering = await tenants.headers("acme", Scope.INTERVENTIONS)
    error_of(await train(server, what, steering), 403, "missing_scope")
    both = await tenants.headers("acme", Scope.INTERVENTIONS, Scope.COMPLETIONS)
    made = (await train(server, what, both)).json()
    assert made["own"]
    error_of(await train(server, what, both, shared=True), 403, "missing_scope")
    shared = (await train(server, what, await tenants.headers("operator"), shared=True)).json()
    other = await tenants.headers("other")
    path = f"/v1/{what}/"
    error_of(await server.client.get(f"{path}{made['id']}", headers=other), 404, f"{what[:-1]}_not_found")
    assert (await server.client.get(f"{path}{shared['id']}", headers=other)).json()["training"]
