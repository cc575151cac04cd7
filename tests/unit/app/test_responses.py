"""Collected results as the JSON that a client reads."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import astuple
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
from app.engine.responses import choice_json
from app.formats import json_text
from app.limits.limit import Limit
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
    CollectedScores,
    CollectedSites,
    CollectedTrace,
    LensRows,
    TensorResult,
)

VALUES = np.arange(6, dtype="<f4").reshape(2, 3)


def floats(values: Any) -> Any:
    return np.array(values, np.float32)


def ints(values: Any) -> Any:
    return np.array(values, np.int32)


LENS = LensRows(ints([[3, 4]]), floats([[-0.5, -math.inf]]), (9,), floats([[-2.0]]), ints([[17]]))
"""Of one position."""


@pytest_asyncio.fixture
async def store(tmp_path: Path) -> AsyncIterator[ResultStore]:
    store = ResultStore(tmp_path, ttl_s=60, limit=Limit("bytes", 100_000), clock=lambda: 1000.75)
    await store.start()
    yield store
    await store.close()


Answer = Callable[..., Awaitable[dict[str, Any]]]


@pytest.fixture
def answer(store: ResultStore) -> Answer:
    """What a client gets of results."""

    async def made(
        *results: CollectedResult, inline_bytes: int = 1000, json_bytes: int = 2**24, **more: Any
    ) -> dict[str, Any]:
        of_answer = {name: more.pop(name) for name in ("work", "operations", "base_path") if name in more}
        found = await choice_json(
            CollectedResults(list(results), **more),
            store=store,
            settings=Settings(inline_tensor_bytes=inline_bytes).with_bounds(inline_json_bytes=json_bytes),
            decode=lambda token_id: f" t{token_id}",
            **{"work": WorkContext(tenant="acme"), **of_answer},
        )
        sent: dict[str, Any] = json.loads(await json_text.json_bytes(found))
        ChoiceInterventions.model_validate(sent)
        return sent

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
    probe = CollectedProbe("p", [0, 1], {"layers.3.output": floats([0.25, math.inf])})
    found = await answer(probe, CollectedLens("lens", [1], {0: LENS, 7: LENS}))
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

    def num_bytes(self, ids: Sequence[int]) -> int:
        return sum(len(self.labels.get(one, "").encode()) for one in ids)


async def test_features_have_labels_and_null_for_what_overflowed(answer: Answer):
    labels = Labels({7: "cats", 2: "dogs"})
    used = DictionaryUsed(name="sae", version=3, id="dict_1")
    read = Features(dictionary=NamedDictionary.of(used, None, labels), name="f")
    other = Features(dictionary=NamedDictionary.of(used, None), name="g")
    read_rows = floats([[3.5, math.inf], [0.0, 0.0], [math.nan, 0.5]])
    work = WorkContext(tenant="acme")
    found = await answer(
        CollectedFeatures("f", [4, 5, 6], ints([[7, 1], [3, 4], [7, 2]]), read_rows, drops_zeros=True),
        CollectedFeatures("g", [4], ints([[7, 2]]), floats([[1.0, 0.0]]), drops_zeros=False),
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
            [{"id": 7, "label": "cats", "activation": None}, {"id": 2, "label": "dogs", "activation": 0.5}],
        ],
    }
    assert found["results"]["g"]["features"] == [
        [{"id": 7, "label": None, "activation": 1.0}, {"id": 2, "label": None, "activation": 0.0}]
    ]
    assert [one["dictionaries"] for one in found["applied"]] == [[used.model_dump()]] * 2
    assert labels.asked == [1, 2, 7]
    assert work.meter.captured_bytes == 8 * 8


async def test_numbers_that_are_too_large_as_json_are_in_the_file(store: ResultStore, answer: Answer):
    """At a limit the whole choice is inline, a byte below it all numbers are in a file."""
    at = "layers.3.output"
    results = [
        CollectedProbe("p/q", [0, 1], {at: floats([0.25, math.inf])}),
        CollectedScores("d", [0, 1], floats([1.5, 2.5])),
        CollectedFeatures("f", [0], ints([[7, 1]]), floats([[3.5, 0.0]]), drops_zeros=True),
        CollectedLens("l", [1], {7: LENS}),
        capture("c"),
    ]
    size = 4 * 20 + (2 + 3) * 60
    inline = await answer(*results, json_bytes=size, inline_bytes=size - 1)
    assert "url" not in str(inline)
    found = (await answer(*results, json_bytes=size - 1, inline_bytes=size - 1))["results"]
    assert "data" in str(found["c"])
    arrays = await stored(store, found["d"]["tensors"]["scores"]["url"])
    assert {
        name: {place: arrays[link["key"]].tolist() for place, link in found[name]["tensors"].items()}
        for name in ("p/q", "d", "f", "l")
    } == {
        "p/q": {at: [0.25, math.inf]},
        "d": {"scores": [1.5, 2.5]},
        "f": {"ids": [[7, 1]], "activations": [[3.5, 0.0]]},
        "l": {
            "7/ids": [[3, 4]],
            "7/logprobs": [[-0.5, -math.inf]],
            "7/target_logprobs": [[-2.0]],
            "7/ranks": [[17]],
        },
    }


async def test_a_million_numbers_do_not_hold_up_the_event_loop(answer: Answer):
    """Others have their turn after each piece of the work, of which there are hundreds."""
    count = 10_000
    many: Any = (one if isinstance(one, tuple) else np.repeat(one, 50, axis=0) for one in astuple(LENS))
    lens = LensRows(*many)
    results = [
        CollectedFeatures(
            "f",
            [*range(count)],
            ints([range(100)] * count),
            np.ones((count, 100), np.float32),
            drops_zeros=True,
        ),
        CollectedProbe("p", [*range(count)], {f"layers.{n}.output": floats(range(count)) for n in range(30)}),
        CollectedLens("l", [*range(50)], dict.fromkeys(range(1000), lens)),
    ]
    num_turns, is_done = 0, False

    async def count_turns() -> None:
        nonlocal num_turns
        while not is_done:
            num_turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(count_turns())
    found = (await answer(*results, json_bytes=2**30))["results"]
    is_done = True
    await beside
    assert num_turns > 500
    assert (len(found["f"]["features"]), len(found["l"]["layers"]["999"])) == (count, 50)


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
    one = TensorResult("int64", (1,), bytes(8))
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
