"""Large bodies do not delay other requests and are parsed like small ones; on the real command's server."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from tests.integration.command_server import Process, started
from tests.integration.conftest import ErrorCheck, Serve
from tests.large_bodies import COMPLETIONS, large_bodies
from tests.liveness import Bystanders
from tests.waiting import wait_for_async

pytestmark = [pytest.mark.heavy, pytest.mark.asyncio(loop_scope="module")]
JSON = {"Content-Type": "application/json"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Process]:
    async with started(tmp_path_factory.mktemp("server")) as process:
        await wait_for_async(process.ready)
        yield process


async def post(server: Process, path: str, body: bytes) -> tuple[int, Any]:
    response = await server.client.post(path, content=body, headers=JSON, timeout=120)
    return response.status_code, response.json()


async def test_large_bodies_delay_no_other_requests(server: Process) -> None:
    bystanders = Bystanders(server.client.base_url.port or 0)
    bodies = large_bodies()
    answers: dict[str, tuple[int, Any]] = {}
    loop = asyncio.get_running_loop()

    def send(name: str, _: int) -> None:
        path, body, _status = bodies[name]
        answers[name] = asyncio.run_coroutine_threadsafe(post(server, path, body), loop).result()

    await asyncio.to_thread(bystanders.unharmed, *(functools.partial(send, name) for name in bodies))
    wrong = {name: answer for name, answer in answers.items() if answer[0] != bodies[name][2]}
    assert not wrong
    for _, answer in answers.values():
        assert answer["error"]["code"] == "invalid_value"


async def test_a_large_body_means_what_a_small_one_does(server: Process) -> None:
    vector = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    many = np.resize(vector, (2000, 64))
    data = base64.b64encode(many.tobytes()).decode()
    tensor = {"dtype": "float32", "shape": list(many.shape), "data": data, "encoding": "base64"}
    answers = []
    for values in (many.tolist(), tensor):
        patch = {"op": "patch", "at": "layers.1.output", "values": values, "where": {"positions": [0]}}
        body = {"prompt": "a\ud800 b", "max_tokens": 1, "interventions": [patch]}
        answers.append(await post(server, COMPLETIONS, json.dumps(body).encode()))
    assert answers[0][0] == answers[1][0]
    assert answers[0][1].get("error") == answers[1][1].get("error")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"prompt": "' + b"a" * 300_000, "invalid_json"),
        (b"[" * 300_000, "json_too_deep"),
        (b'{"prompt": "a", "x": ' + b"[" * 100 + b"]" * 100 + b"}" + b" " * 300_000, "json_too_deep"),
        (b'{"prompt": "a", "x": NaN}' + b" " * 300_000, "not_finite"),
        (b'["' + b"a" * 300_000 + b'"]', "invalid_shape"),
        (b'{"prompt": "\xff"}' + b" " * 300_000, "invalid_json"),
        (b'{"x": ' + b"9" * 300_000 + b"}", "invalid_json"),
    ],
)
async def test_what_is_wrong_with_a_large_body_is_said(server: Process, body: bytes, code: str) -> None:
    status, answer = await post(server, COMPLETIONS, body)
    assert answer["error"]["code"] == code
    assert status in {400, 422}


async def test_a_large_body_whose_client_leaves_costs_the_next_one_nothing(server: Process) -> None:
    path, body, status = large_bodies()["ids"]
    with contextlib.suppress(TimeoutError):  # a fast machine may have answered
        async with asyncio.timeout(0.3):
            await post(server, path, body)
    assert (await post(server, path, body))[0] == status
    assert (await post(server, COMPLETIONS, json.dumps({"prompt": "a" * 300_000, "max_tokens": 1}).encode()))[
        0
    ] in {200, 400}


@pytest.mark.parametrize(
    ("bound", "unit", "body"),
    [
        ("max_field_objects", "8 objects and lists", {"stop": [], "tools": [{}] * 9}),
        ("max_field_values", "8 values", {"logit_bias": {str(number): 1 for number in range(9)}}),
        ("max_prompt_ids", "8 values", {"prompt": list(range(9))}),
    ],
)
async def test_a_low_limit_on_fields_holds_for_small_bodies(
    serve: Serve, error_of: ErrorCheck, bound: str, unit: str, body: dict[str, Any]
) -> None:
    async with serve(**{bound: 8}) as server:
        message = error_of(await server.complete(**body), 400, "invalid_value")
        assert unit in message
        assert (await server.complete(prompt="short")).status_code == 200
