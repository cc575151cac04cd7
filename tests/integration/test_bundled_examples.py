"""The examples of the bundled model: stored once, shared, deleted for good, and for this model alone."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import safetensors.numpy

from app.examples.storing import ExampleFiles, ExampleStores, store_examples
from nnsight_engine.modeling.bundled import bundled_model_path
from tests.integration.conftest import Serve, Server
from tests.integration.dictionary_files import CFG, weights

WIDTH: Final = 8
DESCRIPTIONS: Final = Path(__file__).parents[2] / "app/playground/src/data/example-topics.json"
KINDS: Final = {"vectors": "joy", "detectors": "question", "dictionaries": "topics"}
HEAD: Final = {"parts": [{"at": "layers.1.output", "form": "linear"}], "link": "sigmoid", "threshold": 0.5}
LAYERS: Final = [{"layer": 1, "auroc": 1.0, "accuracy": 1.0, "separation": 2.0, "bias": 0.5, "norm": 2.8}]
COUNTS: Final = {"position": -1, "holdout": 0.25, "seed": 0, "num_positive": 3, "num_negative": 3}


@pytest.fixture
def files(tmp_path: Path) -> ExampleFiles:
    """Examples that fit the fake engine's model."""
    vector = {**COUNTS, "method": "mean_difference", "num_held_out": 2, "best_layer": 1, "layers": LAYERS}
    detector = {
        **COUNTS,
        "kind": "linear",
        "num_held_positive": 1,
        "num_held_negative": 1,
        "layers": [1],
        "auroc": 1.0,
    }
    index = {
        "vectors": [{"name": "joy", "training": vector}],
        "detectors": [{"name": "question", "training": detector}],
        "dictionaries": [{"name": "topics", "cfg": CFG, "labels": {"3": "the sea"}}],
    }
    folder = tmp_path / "examples"
    folder.mkdir()
    (folder / "index.json").write_text(json.dumps(index), encoding="utf-8")
    row = np.ones(WIDTH, np.float32)
    contents = {
        "joy": safetensors.numpy.save({"layers.1.output": row}),
        "question": safetensors.numpy.save({"parts.0.weights": row}, {"detector": json.dumps(HEAD)}),
        "topics": weights(),
    }
    for name, content in contents.items():
        (folder / f"{name}.safetensors").write_bytes(content)
    return ExampleFiles(folder)


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    """Where a folder stands for that of the bundled model."""
    return tmp_path / "cache"


async def store(server: Server, files: ExampleFiles, cache_dir: Path, **changed: Any) -> None:
    """Store examples as the start of a server of the bundled model does."""

    def build(folder: Path, _: object) -> None:
        (folder / "config.json").write_text("{}", encoding="utf-8")

    context = server.context
    server.engine.behaviour.source = str(bundled_model_path(cache_dir=cache_dir, build=build))
    settings = context.settings.model_copy(update={"bundled_model_dir": cache_dir, **changed})
    stores = ExampleStores(context.vectors, context.detectors, context.dictionaries)
    await store_examples(settings, context.engine, stores, files)


async def listed(server: Server, headers: dict[str, str] | None = None) -> dict[str, list[Any]]:
    found = {}
    for kind in KINDS:
        answer = await server.client.get(f"/v1/{kind}", headers=headers)
        assert answer.status_code == 200, answer.text
        found[kind] = answer.json()["data"]
    return found


def names(found: dict[str, list[Any]]) -> dict[str, list[str]]:
    return {kind: [f"{one['name']}@{one['version']}" for one in data] for kind, data in found.items()}


ONCE: Final = {kind: [f"{name}@1"] for kind, name in KINDS.items()}
NONE: Final[dict[str, list[str]]] = {kind: [] for kind in KINDS}


@pytest.mark.both_databases
async def test_they_are_stored_once_and_work_by_their_names(
    serve: Serve, files: ExampleFiles, cache_dir: Path
) -> None:
    async with serve() as server:
        await store(server, files, cache_dir)
        found = await listed(server)
        assert names(found) == ONCE
        assert all(one["shared"] and one["own"] for data in found.values() for one in data)
        assert found["vectors"][0]["training"]["best_layer"] == 1
        assert found["detectors"][0]["training"]["auroc"] == 1.0
        assert found["detectors"][0]["threshold"] == 0.5
        labelled = await server.client.get(
            f"/v1/dictionaries/{found['dictionaries'][0]['id']}/features?query=sea"
        )
        assert labelled.json()["data"] == [{"id": 3, "label": "the sea"}]
        operations = [
            {"op": "steer", "at": "layers.1.output", "vector": {"name": "joy"}},
            {"op": "detect", "detector": "question"},
        ]
        answer = await server.complete(interventions=operations)
        assert answer.status_code == 200, answer.text
        await store(server, files, cache_dir)
        assert names(await listed(server)) == ONCE
    async with serve() as server:  # the next start
        await store(server, files, cache_dir)
        assert names(await listed(server)) == ONCE


@pytest.mark.both_databases
async def test_several_servers_of_one_database_store_them_once(
    serve: Serve, files: ExampleFiles, cache_dir: Path
) -> None:
    async with serve() as first, serve() as second, serve() as third:
        await asyncio.gather(*(store(server, files, cache_dir) for server in (first, second, third)))
        for server in (first, second, third):
            assert names(await listed(server)) == ONCE


@pytest.mark.both_databases
async def test_deleted_they_stay_deleted(serve: Serve, files: ExampleFiles, cache_dir: Path) -> None:
    async with serve() as server:
        await store(server, files, cache_dir)
        for kind, data in (await listed(server)).items():
            answer = await server.client.delete(f"/v1/{kind}/{data[0]['id']}")
            assert answer.status_code == 204, answer.text
        await store(server, files, cache_dir)
        assert names(await listed(server)) == NONE
    async with serve() as server:
        await store(server, files, cache_dir)
        assert names(await listed(server)) == NONE


async def test_a_server_of_another_model_has_none(serve: Serve, files: ExampleFiles, cache_dir: Path) -> None:
    async with serve() as server:
        await store(server, files, cache_dir, bundled_model_dir=cache_dir / "other")
        assert names(await listed(server)) == NONE
        await store(server, files, cache_dir, examples=False)
        assert names(await listed(server)) == NONE


async def test_without_keys_its_caller_may_replace_the_labels(
    serve: Serve, files: ExampleFiles, cache_dir: Path
) -> None:
    async with serve() as server:
        await store(server, files, cache_dir)
        path = f"/v1/dictionaries/{(await listed(server))['dictionaries'][0]['id']}"
        answer = await server.client.put(f"{path}/labels", json={"5": "ships"})
        assert answer.status_code == 200, answer.text
        page = await server.client.get(f"{path}/features", params={"query": "s"})
        assert page.json()["data"] == [{"id": 5, "label": "ships"}]


async def test_a_name_that_is_taken_is_left_alone_and_the_others_are_stored(
    serve: Serve, files: ExampleFiles, cache_dir: Path
) -> None:
    async with serve() as server:
        own = {"name": "joy", "vectors": {"1": [2.0] * WIDTH}}
        made = (await server.client.post("/v1/vectors", json=own)).json()
        await store(server, files, cache_dir)
        found = await listed(server)
        assert [one["id"] for one in found["vectors"]] == [made["id"]]
        assert names(found) == ONCE


async def test_one_that_does_not_fit_is_logged_and_the_others_are_stored(
    serve: Serve, files: ExampleFiles, cache_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wide = safetensors.numpy.save({"layers.1.output": np.ones(WIDTH + 1, np.float32)})
    (tmp_path / "examples" / "joy.safetensors").write_bytes(wide)
    async with serve() as server:
        await store(server, files, cache_dir)
        assert names(await listed(server)) == {**ONCE, "vectors": []}
    assert "the example joy could not be stored: A row for layers.1.output must have 8 numbers" in caplog.text


def test_the_playground_describes_the_features_of_the_bundled_dictionary() -> None:
    files = ExampleFiles()
    (dictionary,) = files.index().dictionaries
    described = json.loads(DESCRIPTIONS.read_text(encoding="utf-8"))
    assert described["sha256"] == hashlib.sha256(files.content(dictionary.name)).hexdigest()
    assert len(described["features"]) == dictionary.cfg["d_sae"]
    for feature, label in dictionary.labels.items():
        about = described["features"][str(feature)]
        assert about["examples"], label
        assert about["promotes"], label
        assert not set(about["promotes"]) & set(about["suppresses"]), label
    word = "the word “ship”"
    (ship,) = [feature for feature, label in dictionary.labels.items() if label == word]
    assert [token for _, token, _, _ in described["features"][str(ship)]["examples"]] == [" ship"] * 3
