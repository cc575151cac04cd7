"""Collected results as the JSON that a client reads."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
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
    CollectedResult,
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


Answer = Callable[..., Awaitable[dict[str, Any]]]


@pytest.fixture
def answer(store: ResultStore) -> Answer:
    """What a client gets of results."""

    async def made(*results: CollectedResult, inline_bytes: int = 1000, **more: Any) -> dict[str, Any]:
        of_answer = {name: more.pop(name) for name in ("work", "operations", "base_path") if name in more}
        found = await choice_json(
            CollectedResults(list(results), **more),
            store=store,
            settings=Settings(inline_tensor_bytes=inline_bytes),
            decode=lambda token_id: f" t{token_id}",
            **{"work": WorkContext(tenant="acme"), **of_answer},
        )
        json.dumps(found, allow_nan=False)
        return found

    return made


def capture(name: str = "resid", reduce: str = "none") -> CollectedCapture:
    tensor = TensorResult("float32", VALUES.shape, VALUES.tobytes())
    return CollectedCapture(name, [4, 5], reduce, {"layers.10.output": tensor, "layers.11.output": tensor})


async def stored(store: ResultStore, url: str) -> dict[str, Any]:
    """Return the tensors of a file."""
    opened = await store.open(url.rpartition("/")[2], "acme")
    found: dict[str, Any] = load(b"".join([chunk async for chunk in opened.chunks()]))
    return found


async def test_what_is_too_large_for_an_answer_is_one_file_behind_a_url(store: ResultStore, answer: Answer):
    one_bytes = 2 * VALUES.nbytes  # the limit counts a whole choice
    whole = await answer(capture("a"), inline_bytes=one_bytes)
    assert all("data" in point for point in whole["results"]["a"]["points"].values())
    found = await answer(capture("a"), capture("b"), inline_bytes=one_bytes, base_path="/api")
    points = found["results"]["b"]["points"]
    sent = points["layers.11.output"]
    assert sent["url"].startswith("/api/v1/results/")
    assert sent["url"] == found["results"]["a"]["points"]["layers.10.output"]["url"]
    assert (sent["format"], sent["dtype"], sent["shape"]) == ("safetensors", "float32", [2, 3])
    assert sent["expires_at"] == 1060
    arrays = await stored(store, sent["url"])
    assert len(arrays) == 4
    np.testing.assert_array_equal(arrays[sent["key"]], VALUES)


async def test_probe_and_lens(answer: Answer):
    row = ([CollectedToken(3, -0.5), CollectedToken(4, -math.inf)], [CollectedToken(9, -2.0, rank=17)])
    probe = CollectedProbe("p", [0, 1], {"layers.3.output": [0.25, math.inf]})
    found = await answer(probe, CollectedLens("lens", [1], {0: [row], 7: [row]}))
    assert found["results"]["p"] == {
        "type": "probe",
        "positions": [0, 1],
        "points": {"layers.3.output": [0.25, None]},
    }
    lens = found["results"]["lens"]
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
    part = await answer(probe, final=False)  # of a stream
    assert list(part) == ["results"]


class Labels:
    """Labels that count what is asked of them."""

    def __init__(self, labels: dict[int, str]) -> None:
        self.labels = labels
        self.asked: list[int] = []

    async def of(self, ids: Sequence[int]) -> dict[int, str]:
        self.asked += ids
        return {one: self.labels[one] for one in ids if one in self.labels}


async def test_features_have_labels_and_null_for_what_overflowed(answer: Answer):
    labels = Labels({7: "cats", 2: "dogs"})
    used = DictionaryUsed(name="sae", version=3, id="dict_1")
    read = Features(dictionary=NamedDictionary.of(used, None, labels), name="f")
    other = Features(dictionary=NamedDictionary.of(used, None), name="g")
    rows = [[(7, 3.5), (1, float("inf"))], [], [(7, float("nan")), (2, 0.0)]]
    work = WorkContext(tenant="acme")
    found = await answer(
        CollectedFeatures("f", [4, 5, 6], rows),
        CollectedFeatures("g", [4], [[(7, 1.0)]]),
        applied=[CollectedSites("features", ["layers.3.output"], [4, 5, 6])] * 2,
        work=work,
        operations=[read, other],
    )
    assert found["results"]["f"] == {
        "type": "features",
        "positions": [4, 5, 6],
        "features": [
            [{"id": 7, "label": "cats", "activation": 3.5}, {"id": 1, "label": None, "activation": None}],
            [],
            [{"id": 7, "label": "cats", "activation": None}, {"id": 2, "label": "dogs", "activation": 0.0}],
        ],
    }
    assert found["results"]["g"]["features"] == [[{"id": 7, "label": None, "activation": 1.0}]]
    assert [one["dictionaries"] for one in found["applied"]] == [[used.model_dump()]] * 2
    assert labels.asked == [1, 2, 7]
    assert work.meter.captured_bytes == 5 * 8
    ChoiceInterventions.model_validate(found)


async def test_a_million_activations_do_not_hold_up_the_event_loop(answer: Answer):
    rows = [[(feature, 1.0) for feature in range(100)]] * 10_000
    task = asyncio.ensure_future(answer(CollectedFeatures("f", list(range(10_000)), rows), final=False))
    num_turns = 0
    while not task.done():
        await asyncio.sleep(0.01)
        num_turns += 1
    assert num_turns > 5
    assert len((await task)["results"]["f"]["features"]) == 10_000


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
    store: ResultStore, answer: Answer, saves: dict[str, Any], grown: dict[str, Any]
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

    found = await answer(CollectedTrace("trace", tensors(saves), tensors(grown), ""), inline_bytes=0)
    result = found["results"]["trace"]
    [url] = set(re.findall(r"/v1/results/([^\"]+)", json.dumps(result)))
    arrays = await stored(store, url)
    assert numbers(result["saves"], arrays) == saves
    assert numbers(result.get("grown", {}), arrays) == grown


async def test_results_and_points_whose_names_run_together_stay_apart(answer: Answer):
    one = TensorResult("int32", (1,), bytes(4))
    captures = [
        CollectedCapture(name, [0], "none", {point: one}) for name, point in (("a", "b/c"), ("a/b", "c"))
    ]
    found = await answer(*captures, inline_bytes=0)
    keys = {point["key"] for result in found["results"].values() for point in result["points"].values()}
    assert len(keys) == 2


@pytest.mark.parametrize("inline_bytes", [0, 1000])
async def test_a_number_and_its_digits_as_keys_are_refused(answer: Answer, inline_bytes: int):
    tensor = TensorResult("float32", VALUES.shape, VALUES.tobytes())
    with pytest.raises(ApiError, match="'trace/rows/1'") as caught:
        await answer(
            CollectedTrace("trace", {"rows": {1: tensor, "1": tensor}}, {}, ""), inline_bytes=inline_bytes
        )
    assert caught.value.code is ErrorCode.TRACE_FAILED
