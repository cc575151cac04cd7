"""Collected results as the JSON that a client reads."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import re
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from safetensors.numpy import load

from api_schemas.dictionaries import DictionaryUsed, NamedDictionary
from api_schemas.errors import ApiError, ErrorCode
from api_schemas.operations import Features
from api_schemas.results import ChoiceInterventions
from app.allowance import Allowance
from app.engine.responses import choice_json
from app.settings import Settings
from app.storage.results import ResultStore
from nnsight_engine.core.work_context import WorkContext
from nnsight_engine.plans.collect.results import (
    CollectedCapture,
    CollectedFeatures,
    CollectedLens,
    CollectedProbe,
    CollectedResults,
    CollectedSites,
    CollectedToken,
    CollectedTrace,
    TensorResult,
)

VALUES = np.arange(6, dtype="<f4").reshape(2, 3)


@pytest_asyncio.fixture
async def store(tmp_path: Path) -> AsyncIterator[ResultStore]:
    store = ResultStore(tmp_path, ttl_s=60, allowance=Allowance.of("bytes", 100_000), clock=lambda: 1000.75)
    await store.start()
    yield store
    await store.close()


def settings(inline_tensor_bytes: int = 1000) -> Settings:
    return Settings(inline_tensor_bytes=inline_tensor_bytes)


def capture(name: str = "resid", reduce: str = "none") -> CollectedCapture:
    tensor = TensorResult("float32", VALUES.shape, VALUES.tobytes())
    return CollectedCapture(name, [4, 5], reduce, {"layers.10.output": tensor, "layers.11.output": tensor})


def word(token_id: int) -> str:
    return f" t{token_id}"


async def test_small_tensors_travel_inline(store: ResultStore):
    collected = CollectedResults(
        [capture()], applied=[CollectedSites("capture", ["layers.10.output"], [4, 5])], tier="tap"
    )
    answer = await choice_json(
        collected, store=store, work=WorkContext(tenant="acme"), settings=settings(), decode=word
    )
    result = answer["results"]["resid"]
    assert result["type"] == "capture"
    assert result["positions"] == [4, 5]
    sent = result["points"]["layers.10.output"]
    assert (sent["dtype"], sent["shape"], sent["encoding"]) == ("float32", [2, 3], "base64")
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(sent["data"]), "<f4").reshape(2, 3), VALUES)
    assert answer["applied"] == [{"op": "capture", "at": ["layers.10.output"], "positions": [4, 5]}]
    assert answer["provenance"] == {
        "fingerprint": "",
        "cached_tokens": 0,
        "recomputed_tokens": 0,
        "drafted_rows": 0,
        "refused_rows": 0,
        "tier": "tap",
    }
    json.dumps(answer, allow_nan=False)


async def test_the_limit_on_inline_tensors_counts_a_whole_choice(store: ResultStore):
    one_capture_bytes = 2 * VALUES.nbytes
    for num_captures, is_inline in ((1, True), (2, False)):
        collected = CollectedResults([capture(f"c{index}") for index in range(num_captures)])
        answer = await choice_json(
            collected,
            store=store,
            work=WorkContext(tenant="acme"),
            settings=settings(one_capture_bytes),
            decode=word,
            base_path="/api",
        )
        points = [point for result in answer["results"].values() for point in result["points"].values()]
        assert all(("data" in point) == is_inline for point in points)
        assert all(("url" in point) != is_inline for point in points)


async def test_large_tensors_are_one_file_behind_a_url(store: ResultStore):
    collected = CollectedResults([capture("a"), capture("b")])
    answer = await choice_json(
        collected,
        store=store,
        work=WorkContext(tenant="acme"),
        settings=settings(0),
        decode=word,
        base_path="/api",
    )
    points = answer["results"]["b"]["points"]
    sent = points["layers.11.output"]
    assert sent["url"].startswith("/api/v1/results/")
    assert sent["url"] == answer["results"]["a"]["points"]["layers.10.output"]["url"]
    assert (sent["format"], sent["dtype"], sent["shape"]) == ("safetensors", "float32", [2, 3])
    assert sent["expires_at"] == 1060
    opened = await store.open(sent["url"].rsplit("/", 1)[1], "acme")
    arrays = load(b"".join([chunk async for chunk in opened.chunks()]))
    assert len(arrays) == 4
    np.testing.assert_array_equal(arrays[sent["key"]], VALUES)


async def test_a_reduced_capture_says_so(store: ResultStore):
    collected = CollectedResults([capture(reduce="mean")])
    answer = await choice_json(
        collected, store=store, work=WorkContext(tenant="acme"), settings=settings(), decode=word
    )
    assert answer["results"]["resid"]["reduce"] == "mean"


async def test_probe_and_lens(store: ResultStore):
    row = ([CollectedToken(3, -0.5), CollectedToken(4, -math.inf)], [CollectedToken(9, -2.0, rank=17)])
    collected = CollectedResults(
        [
            CollectedProbe("p", [0, 1], {"layers.3.output": [0.25, math.inf]}),
            CollectedLens("lens", [1], {0: [row], 7: [row]}),
        ]
    )
    answer = await choice_json(
        collected, store=store, work=WorkContext(tenant="acme"), settings=settings(), decode=word
    )
    assert answer["results"]["p"] == {
        "type": "probe",
        "positions": [0, 1],
        "points": {"layers.3.output": [0.25, None]},
    }
    lens = answer["results"]["lens"]
    assert (lens["type"], lens["positions"], list(lens["layers"])) == ("logit_lens", [1], ["0", "7"])
    assert lens["layers"]["7"] == [
        {
            "top": [
                {"token": " t3", "id": 3, "logprob": -0.5},
                {"token": " t4", "id": 4, "logprob": -9999.0},
            ],
            "targets": [{"token": " t9", "id": 9, "logprob": -2.0, "rank": 17}],
        }
    ]
    json.dumps(answer, allow_nan=False)


class Labels:
    """Labels that count what is asked of them."""

    def __init__(self, labels: dict[int, str]) -> None:
        self.labels = labels
        self.asked: list[int] = []

    async def of(self, ids: Sequence[int]) -> dict[int, str]:
        self.asked += ids
        return {one: self.labels[one] for one in ids if one in self.labels}


async def test_features_have_labels_and_null_for_what_overflowed(store: ResultStore):
    labels = Labels({7: "cats", 2: "dogs"})
    used = DictionaryUsed(name="sae", version=3, id="dict_1")
    read = Features(dictionary=NamedDictionary.of(used, None, labels), name="f")
    other = Features(dictionary=NamedDictionary.of(used, None), name="g")
    rows = [[(7, 3.5), (1, float("inf"))], [], [(7, float("nan")), (2, 0.0)]]
    collected = CollectedResults(
        [CollectedFeatures("f", [4, 5, 6], rows), CollectedFeatures("g", [4], [[(7, 1.0)]])],
        applied=[CollectedSites("features", ["layers.3.output"], [4, 5, 6])] * 2,
    )
    work = WorkContext(tenant="acme")
    answer = await choice_json(
        collected, store=store, work=work, settings=settings(), decode=word, operations=[read, other]
    )
    assert answer["results"]["f"] == {
        "type": "features",
        "positions": [4, 5, 6],
        "features": [
            [
                {"id": 7, "label": "cats", "activation": 3.5},
                {"id": 1, "label": None, "activation": None},
            ],
            [],
            [
                {"id": 7, "label": "cats", "activation": None},
                {"id": 2, "label": "dogs", "activation": 0.0},
            ],
        ],
    }
    assert answer["results"]["g"]["features"] == [[{"id": 7, "label": None, "activation": 1.0}]]
    assert [one["dictionaries"] for one in answer["applied"]] == [[used.model_dump()]] * 2
    assert labels.asked == [1, 2, 7]
    assert work.meter.captured_bytes == 5 * 8
    ChoiceInterventions.model_validate(answer)
    json.dumps(answer, allow_nan=False)


async def test_a_million_activations_do_not_hold_up_the_event_loop(store: ResultStore):
    rows = [[(feature, 1.0) for feature in range(100)]] * 10_000
    collected = CollectedResults([CollectedFeatures("f", list(range(10_000)), rows)], final=False)
    work = WorkContext(tenant="acme")
    task = asyncio.create_task(
        choice_json(collected, store=store, work=work, settings=settings(), decode=word)
    )
    num_turns = 0
    while not task.done():
        await asyncio.sleep(0.01)
        num_turns += 1
    assert num_turns > 5
    assert len((await task)["results"]["f"]["features"]) == 10_000


async def test_a_part_of_a_stream_has_results_alone(store: ResultStore):
    part = CollectedResults([CollectedProbe("p", [5], {"layers.3.output": [1.0]})], final=False)
    answer = await choice_json(
        part, store=store, work=WorkContext(tenant="acme"), settings=settings(), decode=word
    )
    assert list(answer) == ["results"]


@pytest.mark.parametrize(
    ("saves", "grown"),
    [
        ({"a": {"b": 1}, "a/b": 2}, {}),
        ({"a": {"b/c": 1, "b": {"c": 2}}}, {}),
        ({"a~1b": 1, "a/b": 2, "a~01b": 3}, {}),
        ({"rows": [1, 2]}, {"rows": [3, 4]}),
        ({"~grown": {"rows": [1]}, "grown/rows": [2]}, {"rows": [3]}),
        ({"": 1}, {"": [2]}),
    ],
)
async def test_every_saved_tensor_has_a_key_of_its_own(
    store: ResultStore, saves: dict[str, Any], grown: dict[str, Any]
):
    def tensors(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: tensors(item) for key, item in value.items()}
        if isinstance(value, list):
            return list(map(tensors, value))
        return TensorResult("float32", (1,), np.array([value], "<f4").tobytes())

    def numbers(value: Any, arrays: dict[str, Any]) -> Any:
        if isinstance(value, list):
            return [numbers(item, arrays) for item in value]
        if "key" in value:
            return int(arrays[value["key"]][0])
        return {key: numbers(item, arrays) for key, item in value.items()}

    collected = CollectedResults([CollectedTrace("trace", tensors(saves), tensors(grown), "")])
    answer = await choice_json(
        collected, store=store, work=WorkContext(tenant="acme"), settings=settings(0), decode=word
    )
    result = answer["results"]["trace"]
    [url] = set(re.findall(r"/v1/results/([^\"]+)", json.dumps(result)))
    opened = await store.open(url, "acme")
    arrays = load(b"".join([chunk async for chunk in opened.chunks()]))
    assert numbers(result["saves"], arrays) == saves
    assert numbers(result.get("grown", {}), arrays) == grown


async def test_results_and_points_whose_names_run_together_stay_apart(store: ResultStore):
    def one(value: int) -> TensorResult:
        return TensorResult("int32", (1,), np.array([value], "<i4").tobytes())

    captures = [
        CollectedCapture("a", [0], "none", {"b/c": one(1)}),
        CollectedCapture("a/b", [0], "none", {"c": one(2)}),
    ]
    answer = await choice_json(
        CollectedResults(captures),
        store=store,
        work=WorkContext(tenant="acme"),
        settings=settings(0),
        decode=word,
    )
    keys = [answer["results"]["a"]["points"]["b/c"]["key"], answer["results"]["a/b"]["points"]["c"]["key"]]
    assert len(set(keys)) == 2


@pytest.mark.parametrize("inline_bytes", [0, 1000])
async def test_a_number_and_its_digits_as_keys_are_refused(store: ResultStore, inline_bytes: int):
    tensor = TensorResult("float32", VALUES.shape, VALUES.tobytes())
    saves = {"rows": {1: tensor, "1": tensor}}
    collected = CollectedResults([CollectedTrace("trace", saves, {}, "")])
    with pytest.raises(ApiError, match="'trace/rows/1'") as caught:
        await choice_json(
            collected,
            store=store,
            work=WorkContext(tenant="acme"),
            settings=settings(inline_bytes),
            decode=word,
        )
    assert caught.value.code is ErrorCode.TRACE_FAILED
