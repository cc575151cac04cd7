"""LoRA adapters as models of the server: at its start, at run time, on every route, and in traces."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import pytest_asyncio
import torch

from nnsight_engine import CONFIG, save
from nnsight_engine.remote_backend.errors import RemoteError
from nnsight_engine.vllm_backend.vllm import VLLM
from tests.e2e.adapted import (
    ADAPTED,
    BASE,
    BLOCK_SIZE,
    CONTEXT,
    FIRST,
    SECOND,
    Adapted,
    adapted,
    expected,
    head_adapter,
    write_broken,
)
from tests.e2e.family_check import PROMPT_IDS, Expected
from tests.e2e.keyed import OPERATOR, keys_in
from tests.e2e.live import MODEL, Live, live_server
from tests.waiting import wait_for_async

__all__ = ["adapted", "expected"]  # fixtures

pytestmark = [pytest.mark.e2e, pytest.mark.heavy, pytest.mark.asyncio(loop_scope="module")]

_NUM_TOKENS: Final = 6
NAMED: Final = {FIRST: FIRST, MODEL: BASE}
"""What the models of the server are among those that transformers has computed."""
_LOAD: Final = "/v1/load_lora_adapter"
_UNLOAD: Final = "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Make an operator's key, whom the server's data and this process's clients know."""
    data = tmp_path_factory.mktemp("data")
    key = keys_in(data, operator=OPERATOR)["operator"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CONFIG.API, "KEY", key)
        patch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
        yield key, data


@pytest.fixture(scope="module")
def root_level() -> int:
    """Return the level of the root logger before a server starts."""
    return logging.root.level


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def live(
    root_level: int,
    adapted: Adapted,
    expected: dict[str, Expected],
    key: tuple[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Live]:
    """Serve the model with the first adapter."""
    del root_level  # read before the start
    options = (
        *("--max-model-len", str(CONTEXT), "--dtype", "float32", "--block-size", str(BLOCK_SIZE)),
        *ADAPTED,
        *("--lora-modules", f"first={adapted.adapters[FIRST]}"),
    )
    results = tmp_path_factory.mktemp("results")
    async with live_server(adapted.base, results, *options, data_dir=key[1]) as live:
        live.http.headers["authorization"] = f"Bearer {key[0]}"
        yield live


async def continued(live: Live, name: str, **body: Any) -> list[int]:
    body = {"prompt": PROMPT_IDS, "max_tokens": _NUM_TOKENS, "ignore_eos": True} | body
    response = await live.post(model=name, return_token_ids=True, **body)
    assert response.status_code == 200, response.text
    tokens: list[int] = response.json()["choices"][0]["token_ids"]
    return tokens


async def change(live: Live, path: str, status: int, **body: Any) -> str:
    response = await live.http.post(path, json=body)
    assert response.status_code == status, response.text
    return response.text


async def names(live: Live) -> set[str]:
    return {card["id"] for card in (await live.http.get("/v1/models")).json()["data"]}


async def test_an_adapter_is_a_model_of_the_list(live: Live, adapted: Adapted) -> None:
    cards = {card["id"]: card for card in (await live.http.get("/v1/models")).json()["data"]}
    assert cards.keys() == {MODEL, "first"}
    assert not any(str(folder.parent) in str(cards) for folder in (adapted.base, *adapted.adapters.values()))
    assert (cards["first"]["parent"], cards["first"]["root"]) == (MODEL, "first")
    assert (await live.http.get("/v1/capabilities")).json()["adapters"] == ["first"]
    assert "first" in (await live.http.get("/v1/status")).json()["models"][0]["names"]


@pytest.mark.usefixtures("live")
async def test_warnings_are_still_logged(root_level: int) -> None:
    assert logging.root.level == root_level <= logging.WARNING


@pytest.mark.parametrize("name", NAMED)
async def test_each_name_gives_what_its_merged_weights_give(
    live: Live, expected: dict[str, Expected], name: str
) -> None:
    capture = {"op": "capture", "at": "layers.2.mlp.output", "where": {"phase": "prompt"}, "name": "x"}
    tokens = await continued(live, name)
    assert tokens == expected[NAMED[name]].plain.token_ids
    body = {"prompt": PROMPT_IDS, "max_tokens": 1, "interventions": [capture, {"op": "logit_lens"}]}
    (choice,) = (await live.post(model=name, **body)).json()["choices"]
    assert len(choice["interventions"]["results"]["x"]["points"]) == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "dogs"}], "max_tokens": 3}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "dogs"}], "max_tokens": 3}),
        ("/v1/responses", {"input": "dogs", "max_output_tokens": 3}),
        ("/v1/responses", {"input": "dogs", "max_output_tokens": 3, "interventions": [{"op": "logit_lens"}]}),
        ("/tokenize", {"prompt": "dogs"}),
        ("/v1/completions", {"prompt": "dogs", "prompt_logprobs": 2}),
    ],
)
async def test_every_route_takes_an_adapter_and_no_unknown_name(
    live: Live, path: str, body: dict[str, Any]
) -> None:
    answer = await live.http.post(path, json={"model": "first", **body})
    assert answer.status_code == 200, answer.text
    assert answer.json().get("model", "first") == "first"
    unknown = await live.http.post(path, json={"model": "third", **body})
    assert unknown.status_code == 404, unknown.text


async def test_adapters_are_loaded_and_unloaded_at_run_time(
    live: Live, adapted: Adapted, expected: dict[str, Expected], tmp_path: Path
) -> None:
    folder = shutil.copytree(adapted.adapters[SECOND], tmp_path / "adapter")
    given = {"lora_name": "other", "lora_path": str(folder)}
    assert "added successfully" in await change(live, _LOAD, 200, **given)
    assert await names(live) == {MODEL, "first", "other"}
    long: dict[str, Any] = {"prompt": PROMPT_IDS * 6, "max_tokens": 3, "ignore_eos": True}
    of_second = await continued(live, "other", **long)
    assert await continued(live, "other") == expected["second"].plain.token_ids
    refused = await change(live, _LOAD, 400, **given)
    assert "'other' is already the name of an adapter" in refused
    assert "inplace" not in refused
    assert "removed successfully" in await change(live, _UNLOAD, 200, lora_name="other")
    assert (await live.post(model="other", prompt="a")).status_code == 404
    await change(live, _UNLOAD, 404, lora_name="other")
    # Other weights under the same name and path: nothing is left of the ones before.
    shutil.copytree(adapted.adapters[FIRST], folder, dirs_exist_ok=True)
    await change(live, _LOAD, 200, **given)
    assert await continued(live, "other") == expected["first"].plain.token_ids
    of_first = await continued(live, "first", **long)
    assert await continued(live, "other", **long) == of_first != of_second
    await change(live, _UNLOAD, 200, lora_name="other")


async def test_a_listed_adapter_needs_its_folder_no_more(
    live: Live, adapted: Adapted, expected: dict[str, Expected], tmp_path: Path
) -> None:
    """Even if its last request waits for a slot while it is unloaded, and others take its place."""
    folders = {name: shutil.copytree(adapted.adapters[SECOND], tmp_path / name) for name in ("a", "b", "c")}
    for name, folder in folders.items():
        await change(live, _LOAD, 200, lora_name=name, lora_path=str(folder))
    shutil.rmtree(tmp_path)
    wanted = expected[SECOND].plain.token_ids
    busy = [asyncio.create_task(continued(live, name, max_tokens=100)) for name in ("b", "c", "b", "c")]
    core = live.engine.engine.output_processor
    await wait_for_async(lambda: core.get_num_unfinished_requests() == len(busy))
    waiting = asyncio.create_task(continued(live, "a"))
    await wait_for_async(lambda: core.get_num_unfinished_requests() == len(busy) + 1)
    await change(live, _UNLOAD, 200, lora_name="a")
    for name in ("d", "e"):  # of the engine's two places, none is free for these
        await change(live, _LOAD, 200, lora_name=name, lora_path=str(adapted.adapters[FIRST]))
    assert (await asyncio.gather(waiting, *busy))[0] == wanted
    assert await continued(live, "b") == wanted
    assert await continued(live, "e") == expected[FIRST].plain.token_ids
    for name in ("b", "c", "d", "e"):
        await change(live, _UNLOAD, 200, lora_name=name)
    assert await continued(live, "first") == expected[FIRST].plain.token_ids
    assert (await live.post(model="a", prompt="a")).status_code == 404


async def test_what_cannot_be_loaded_is_refused(
    live: Live, adapted: Adapted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"lora_name": "bad", "lora_path": str(tmp_path / "missing")}
    await change(live, _LOAD, 404, **given)
    head = await change(live, _LOAD, 400, lora_name="bad", lora_path=str(head_adapter(tmp_path / "head")))
    assert "lm_head" in head
    for kind in ("half the width", "rank 10^6", "no factor", "NaN"):
        reason = write_broken(adapted.adapters[FIRST], kind, tmp_path / kind)
        answer = await change(live, _LOAD, 400, lora_name="bad", lora_path=str(tmp_path / kind))
        assert re.search(reason, json.loads(answer)["error"]["message"]), answer
    for path in ("\0", "a" * 3000, "~nobody/adapter", "", "/proc/1/root"):
        await change(live, _LOAD, 404, lora_name="bad", lora_path=path)
    for name in ("", " ", "..", "a\nb", "a:b", "a" * 65, "<img src=x onerror=alert(1)>"):
        await change(live, _LOAD, 400, lora_name=name, lora_path=str(adapted.adapters[FIRST]))
    in_place = {"lora_name": "first", "lora_path": str(adapted.adapters[SECOND]), "load_inplace": True}
    assert "load_inplace" in await change(live, _LOAD, 400, **in_place)
    assert await names(live) == {MODEL, "first"}
    monkeypatch.delenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING")
    for path in (_LOAD, _UNLOAD):
        assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in await change(live, path, 404, **given)
    assert (await live.post(model="first", prompt="a")).status_code == 200


# Traces.


def _logits(live: Live, name: str) -> torch.Tensor:
    model = VLLM(name, remote=str(live.http.base_url))
    with model.trace(PROMPT_IDS, temperature=0.0):
        called = save(model.layers[1].mlp(model.layers[1].mlp.input))
        own = save(model.layers[1].mlp.output)
        logits = save(model.logits.output)
    torch.testing.assert_close(called, own, rtol=1e-4, atol=1e-4)
    first: torch.Tensor = logits[0]
    return first


def _logits_of_session(live: Live, name: str) -> torch.Tensor:
    model = VLLM(name, remote=str(live.http.base_url))
    with model.session(remote=str(live.http.base_url)), model.trace(PROMPT_IDS, temperature=0.0):
        logits = save(model.logits.output)
    first: torch.Tensor = logits[0]
    return first


@pytest.mark.parametrize("send", [_logits, _logits_of_session])
@pytest.mark.parametrize("name", NAMED)
async def test_a_trace_runs_with_the_adapter_that_it_names(
    live: Live, expected: dict[str, Expected], name: str, send: Any
) -> None:
    logits = await asyncio.to_thread(send, live, name)
    torch.testing.assert_close(logits, expected[NAMED[name]].plain.logits[0], rtol=1e-3, atol=1e-4)


async def test_a_trace_of_an_unknown_adapter_is_refused(live: Live) -> None:
    with pytest.raises(RemoteError, match="third"):
        await asyncio.to_thread(_logits, live, "third")
