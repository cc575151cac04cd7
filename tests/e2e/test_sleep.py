"""An engine that is paused or sleeps: what waits in it, what it ends, and that nothing takes it for dead."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio
import torch
from prometheus_client.parser import text_string_to_metric_families

from nnsight_engine.remote_backend.frames import Frame, FrameKind
from nnsight_engine.remote_backend.values.outcomes import read_outcomes
from nnsight_engine.vllm_backend.vllm import VLLM
from tests.e2e.keyed import OPERATOR, keys_in
from tests.e2e.live import MODEL, Live, live_server
from tests.e2e.server import Server
from tests.e2e.test_traces_http import endless, frames_of
from tests.families.checkpoints import write_checkpoint
from tests.waiting import wait_for_async

pytestmark = [pytest.mark.e2e, pytest.mark.heavy, pytest.mark.asyncio(loop_scope="module")]

PROMPT = [5, 9, 11, 3]
LENGTH = 200
MODES = ["keep", "wait", "abort"]
STEER = {"op": "steer", "at": "layers.0.output", "vector": [0.5] * 128, "scale": 1.0}
CAPTURE = {"op": "capture", "at": ["layers.1.output"], "name": "c"}
KINDS: dict[str, list[Any]] = {
    "plain": [],
    "declared": [STEER, CAPTURE],
    "code": [{"op": "trace", "code": "h = model.layers[1].output.float().save()", "name": "t"}],
}
STALL_S = 6.0
PAUSES = {"sleep": ("/sleep?level=0&mode=", "/wake_up"), "pause": ("/pause?mode=", "/resume")}


@dataclasses.dataclass
class Asked:
    """The requests of all kinds that are under way together."""

    streams: dict[str, asyncio.Task[list[Any]]]
    begun: list[asyncio.Event]
    whole: dict[str, asyncio.Task[Any]]
    trace: asyncio.Task[list[Frame]]

    @property
    def tasks(self) -> list[asyncio.Task[Any]]:
        return [*self.streams.values(), *self.whole.values(), self.trace]


class Sleeper:
    def __init__(self, live: Live, trace: bytes) -> None:
        self.live = live
        self.trace = trace

    def ask(self) -> Asked:
        begun = [asyncio.Event() for _ in [*KINDS, "trace"]]
        streams = {
            kind: asyncio.create_task(self._stream(event, KINDS[kind]))
            for kind, event in zip(KINDS, begun, strict=False)
        }
        whole = {
            kind: asyncio.create_task(self.live.http.post("/v1/completions", json=body(KINDS[kind])))
            for kind in KINDS
        }
        return Asked(streams, begun, whole, asyncio.create_task(self._traced(begun[-1])))

    async def under_way(self) -> Asked:
        """Send them, and wait until each stream and the trace have begun."""
        asked = self.ask()
        for event in asked.begun:
            await event.wait()
        assert not any(task.done() for task in asked.tasks)
        return asked

    async def post(self, path: str) -> Any:
        answer = await self.live.http.post(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def is_asleep(self) -> bool:
        found = [(await self.live.http.get(f"/is_{name}")).json() for name in ("sleeping", "paused")]
        (sleeping,), (paused,) = (one.values() for one in found)
        assert sleeping is paused
        return bool(sleeping)

    async def sleep_state(self) -> float:
        """Return vLLM's metric: 1 for awake."""
        text = (await self.live.http.get("/metrics")).text
        families = {one.name: one for one in text_string_to_metric_families(text)}
        samples = families["vllm:engine_sleep_state"].samples
        return next(one.value for one in samples if one.labels["sleep_state"] == "awake")

    async def _stream(self, begun: asyncio.Event, operations: list[Any]) -> list[Any]:
        found = []
        async with self.live.http.stream(
            "POST", "/v1/completions", json=body(operations, stream=True)
        ) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    found.append(json.loads(line.removeprefix("data: ")))
                    begun.set()
        return found

    async def _traced(self, begun: asyncio.Event) -> list[Frame]:
        found = []
        async for frame in frames_of(self.live, self.trace):
            found.append(frame)
            if frame.kind is FrameKind.EVENT and "step 1" in str(frame.json()):
                begun.set()
        return found


def body(operations: list[Any], **others: Any) -> dict[str, Any]:
    sent = {"interventions": operations} if operations else {}
    return {
        "model": MODEL, "prompt": PROMPT, "max_tokens": LENGTH, "temperature": 0, "ignore_eos": True,
        **sent, **others,
    }  # fmt: skip


def read_of(choices: list[Any]) -> Any:
    """Return what a choice has read, over all events of its stream: positions and rows by point."""
    found: dict[str, tuple[list[int], bytes]] = {}
    for choice in choices:
        for result in ((choice.get("interventions") or {}).get("results") or {}).values():
            for point, tensor in result.get("points", {}).items():
                positions, rows = found.get(point, ([], b""))
                found[point] = (positions + result["positions"], rows + base64.b64decode(tensor["data"]))
    return found


def assert_alike(found: Any, expected: Any) -> None:
    """Compare what ``read`` found, but for the last bits of values: they depend on the rest of the batch."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            pair = (found[key], value)
            assert_alike(*(map(base64.b64decode, pair) if key == "data" else pair))
    elif isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    elif isinstance(expected, list | tuple):
        for one, other in zip(found, expected, strict=True):
            assert_alike(one, other)
    elif isinstance(expected, bytes):
        rows, wanted = (np.frombuffer(one, np.float32) for one in (found, expected))
        np.testing.assert_allclose(rows, wanted, rtol=1e-3, atol=1e-4)
    else:
        assert found == expected


async def read(asked: Asked) -> dict[str, Any]:
    """Wait for all requests; return text and values of each, without what an answer has of its own."""
    found: dict[str, Any] = {}
    for kind, stream in asked.streams.items():
        choices = [event["choices"][0] for event in await stream]
        found[f"streamed {kind}"] = ("".join(one["text"] for one in choices), read_of(choices))
    for kind, answer in asked.whole.items():
        (choice,) = (await answer).json()["choices"]
        found[kind] = (choice["text"], read_of([choice]))
        if kind == "code":
            found["saved"] = choice["interventions"]["results"]
    results = [one.data for one in await asked.trace if one.kind is FrameKind.RESULT]
    found["trace"] = tuple(outcome.saves for one in results for outcome in read_outcomes(one, []))
    return found


@pytest.fixture(scope="module", autouse=True)
def strict_answers() -> None:
    """Take the reason `abort`, with which vLLM ends requests that it aborts; clients do not declare it."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def whole(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Sleeper]:
    """Serve a tiny model, with a short limit on the time in which an engine must answer."""
    folder = write_checkpoint("llama", tmp_path_factory.mktemp("sleep"))
    options = ("--max-model-len", "256", "--dtype", "float32")
    data = tmp_path_factory.mktemp("data")
    key = (await asyncio.to_thread(keys_in, data, operator=OPERATOR))["operator"]
    settings = {"engine_stall_timeout_s": STALL_S, "inline_tensor_bytes": 2**24, "data_dir": data}
    async with live_server(folder, tmp_path_factory.mktemp("results"), *options, **settings) as live:
        live.http.headers["authorization"] = f"Bearer {key}"
        outline = (await live.http.get("/v1/traces/outline")).json()
        model = VLLM(str(folder), remote=str(live.http.base_url))
        trace = await asyncio.to_thread(endless, model, outline, max_tokens=LENGTH)
        yield Sleeper(live, trace.to_bytes())


@pytest_asyncio.fixture(loop_scope="module")
async def sleeper(whole: Sleeper) -> AsyncIterator[Sleeper]:
    """Give the server to a test, after which it works and holds nothing."""
    yield whole
    assert not await whole.is_asleep()
    assert not any((await whole.live.held()).values())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(whole: Sleeper) -> dict[str, Any]:
    """Read everything while nobody sleeps."""
    return await read(whole.ask())


@pytest.mark.parametrize("pause", PAUSES)
@pytest.mark.parametrize("mode", MODES)
async def test_what_is_sent_meanwhile_waits_and_is_answered_as_always(
    sleeper: Sleeper, expected: dict[str, Any], mode: str, pause: str
) -> None:
    stop, go = PAUSES[pause]
    before = await sleeper.under_way()
    await sleeper.post(stop + mode)
    assert await sleeper.is_asleep()
    if mode == "wait":
        await asyncio.wait_for(asyncio.gather(*before.tasks), timeout=30)
    later = sleeper.ask()
    await asyncio.sleep(0.5)
    assert not any(task.done() for task in later.tasks)
    assert (await sleeper.live.http.get("/health")).status_code == 200
    assert pause == "pause" or await sleeper.sleep_state() == 0
    if mode == "abort":
        await check_ends(before)
    assert mode != "keep" or not any(task.done() for task in before.tasks)
    await sleeper.post(go)
    assert await sleeper.sleep_state() == 1
    if mode != "abort":
        assert_alike(await read(before), expected)
    assert_alike(await read(later), expected)


async def check_ends(asked: Asked) -> None:
    """Check that aborted requests end as vLLM's do, or say that they have no results."""
    for kind in KINDS:
        events, answer = await asked.streams[kind], await asked.whole[kind]
        if kind == "declared":
            assert events[-1]["error"]["code"] == "engine_paused"
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_paused")
            continue
        assert events[-1]["choices"][0]["finish_reason"] == "abort"
        assert answer.json()["choices"][0]["finish_reason"] == "abort"
    kinds = {frame.kind: frame for frame in await asked.trace}
    assert FrameKind.ERROR not in kinds
    assert "abort" in json.dumps(kinds[FrameKind.OUTPUTS].json())


async def test_a_long_sleep_is_no_hang(sleeper: Sleeper) -> None:
    engine = sleeper.live.engine.engine
    stream = asyncio.create_task(sleeper.live.http.post("/v1/completions", json=body([])))
    await sleeper.post("/sleep?level=0&mode=keep")
    await asyncio.sleep(2 * STALL_S)
    await sleeper.post("/wake_up?tags=scheduling")
    assert (await stream).status_code == 200
    assert sleeper.live.engine.engine is engine
    assert sleeper.live.engine.alive


async def test_clients_that_leave_a_sleeping_engine_leave_nothing(sleeper: Sleeper) -> None:
    before = await sleeper.under_way()
    await sleeper.post("/sleep?level=0&mode=keep")
    later = sleeper.ask()
    await asyncio.sleep(0.2)
    for task in [*before.tasks, *later.tasks]:
        task.cancel()
    await asyncio.gather(*before.tasks, *later.tasks, return_exceptions=True)

    async def holds_nothing() -> bool:
        return not any((await counts(sleeper)).values())

    await wait_for_async(holds_nothing)
    await sleeper.post("/wake_up")


async def counts(sleeper: Sleeper) -> dict[str, int]:
    (found,) = await sleeper.live.engine.engine.collective_rpc("count_interventions")
    return dict(found)


async def test_waking_up_ends_a_sleep_that_waits(sleeper: Sleeper) -> None:
    before = await sleeper.under_way()
    sleeping = asyncio.create_task(sleeper.post("/sleep?level=0&mode=wait"))
    await asyncio.sleep(0.1)
    await sleeper.post("/wake_up")
    await sleeping
    await asyncio.gather(*before.tasks)
    assert await sleeper.sleep_state() == 1


@pytest.mark.parametrize(
    ("query", "reason"),
    [("", "--enable-sleep-mode"), ("?level=1&mode=wait", "--enable-sleep-mode"), ("?level=2", "weights")],
)
async def test_levels_that_free_memory_are_refused_without_the_option(
    sleeper: Sleeper, query: str, reason: str
) -> None:
    answer = await sleeper.live.http.post(f"/sleep{query}")
    assert answer.status_code == 400
    assert (answer.json()["error"]["code"], answer.json()["error"]["param"]) == (
        "unsupported_combination",
        "level",
    )
    assert reason in answer.json()["error"]["message"]


async def test_a_server_whose_engine_sleeps_ends_in_time(tmp_path: Path) -> None:
    model, data = write_checkpoint("llama", tmp_path / "model"), tmp_path / "data"
    key = (await asyncio.to_thread(keys_in, data, operator=OPERATOR))["operator"]
    environment = {"NNSIGHT_ENGINE_DATA_DIR": str(data), "NNSIGHT_ENGINE_DRAIN_TIMEOUT_S": "2"}
    arguments = ["--served-model-name", MODEL, "--dtype", "float32"]
    server = Server(str(model), arguments=arguments, environment=environment, stop_timeout_s=60)
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=server.base_url, headers=headers, timeout=120) as client:
        await asyncio.to_thread(server.__enter__)
        try:
            assert (await client.post("/sleep?level=0")).is_success
            waiting = asyncio.create_task(client.post("/v1/completions", json=body([])))
            await asyncio.sleep(0.5)
        finally:
            await asyncio.to_thread(server.stop)
        assert (await waiting).json()["error"]["code"] == "draining"


@pytest.mark.parametrize("path", ["/sleep?level=7", "/sleep?mode=x&level=0", "/pause?mode=x"])
async def test_wrong_values_are_refused(sleeper: Sleeper, path: str) -> None:
    assert (await sleeper.live.http.post(path)).status_code == 400
