"""What one tenant's requests cost another: the server is alive, its first tokens come, and they are right."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import httpx
import pytest

from tests.e2e.keyed import KeyedServer, Tenant
from tests.liveness import Bystanders

pytestmark = [pytest.mark.e2e, pytest.mark.heavy]

PROMPT: Final = "The Eiffel Tower is in the city of"
BUSY: Final = """
import time
def busy():
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
"""
SLOW_BLOCKS: Final = {
    "layers": f"{BUSY}\nfor step in tracer.iter[:]:\n    model.layers[5].output[:] *= 1.5\n    busy()",
    "prompt logprobs": f"{BUSY}\nmodel.layers[5].output[:] *= 1.5\nbusy()",
}
BESIDE: Final[dict[str, dict[str, Any]]] = {
    "layers": {"max_tokens": 4},
    "prompt logprobs": {"max_tokens": 1, "prompt_logprobs": 0},
}
"""Beside the last a block cannot be left out of a step."""


def trace(tenant: Tenant, code: str, **body: Any) -> httpx.Response:
    return tenant.complete({"op": "trace", "code": code, "name": "t"}, prompt=PROMPT, **body)


def texts_of(tenant: Tenant) -> list[str]:
    return [tenant.choices(prompt=f"{number}. {PROMPT}")[0]["text"] for number in range(4)]


def answers_beside(
    neighbour: Tenant, num_threads: int, disturb: Callable[[], httpx.Response]
) -> list[httpx.Response]:
    """See that a neighbour is served as ever while somebody sends without end; returns their answers."""
    expected, answers = texts_of(neighbour), list[httpx.Response]()

    def send(_: int) -> None:
        is_over = threading.Event()

        def send_again() -> None:
            while not is_over.is_set():
                answers.append(disturb())

        with ThreadPoolExecutor(num_threads) as pool:
            sending = [pool.submit(send_again) for _ in range(num_threads)]
            time.sleep(1.5)
            texts = texts_of(neighbour)
            is_over.set()
            for one in sending:
                one.result()
        assert texts == expected

    Bystanders(neighbour.base_url.port or 0, neighbour.key).unharmed(send)
    return answers


@pytest.fixture
def stranger(keyed_server: KeyedServer) -> Tenant:
    return keyed_server.tenant("stranger")


@pytest.fixture
def neighbour(keyed_server: KeyedServer) -> Tenant:
    return keyed_server.tenant("rival")


@pytest.mark.parametrize("name", SLOW_BLOCKS)
def test_slow_blocks_of_a_tenant_keep_nobody_else_waiting(
    name: str, stranger: Tenant, neighbour: Tenant
) -> None:
    answers = answers_beside(neighbour, 8, lambda: trace(stranger, SLOW_BLOCKS[name], **BESIDE[name]))
    texts = set()
    for answer in answers:
        if answer.status_code == 400:  # where the machine is so busy that a block hardly computes
            assert "within one step" in answer.json()["error"]["message"], answer.text
            continue
        assert answer.status_code == 200, answer.text
        texts.add(answer.json()["choices"][0]["text"])
    assert len(texts) == 1


ROWS: Final = "rows = model.layers[0].output.new_zeros"
"""Rows in the dtype of the model."""
COSTLY: Final = {
    "unembedding": (f"{ROWS}(1024, 576)\nfor _ in range(99):\n    model.lm_head(rows)", "within one step"),
    "mlp": (
        f"{ROWS}(2048, 576)\nfor _ in range(999):\n    model.model.layers[0].mlp(rows)",
        "within one step",
    ),
    # 384 MiB of logits in float32.
    "bytes": (f"{ROWS}(2048, 576)\nmodel.lm_head(rows)", "call it with 1,365 rows or fewer"),
    "rows": (f"{ROWS}(9999, 576)\nmodel.lm_head(rows)", "rows at once"),
    "large rows": (f"{ROWS}(99999, 576)\nmodel.lm_head(rows)", "may leave the sandbox|rows at once"),
    "huge rows": (f"{ROWS}(1, 1).expand(2**30, 576)\nmodel.lm_head(rows)", "leave the sandbox"),
    "huge value": (
        "model.layers[5].output = torch.zeros(1).expand(2**40)",
        "shape|bytes|of memory",
    ),
    "huge stream": (
        "model.layers[5].output = torch.zeros(1, 1, dtype=torch.bfloat16).expand(2**20, 2**12)",
        "shape|bytes|of memory",
    ),
    "huge save": (
        "h = torch.zeros(1).expand(2**33).save()",
        "bytes|of memory",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COSTLY)
def test_what_costs_too_much_is_refused_and_keeps_nobody_else_waiting(
    name: str, stranger: Tenant, neighbour: Tenant
) -> None:
    code, said = COSTLY[name]
    for answer in answers_beside(neighbour, 4, lambda: trace(stranger, code, max_tokens=1)):
        assert answer.status_code == 400, answer.text
        assert re.search(said, answer.json()["error"]["message"]), answer.text


def test_a_block_that_a_step_did_not_wait_for_sees_what_it_would_have_seen(stranger: Tenant) -> None:
    code = """
import time
def wait():
    end = time.perf_counter() + 0.1
    while time.perf_counter() < end:
        pass
seen = [].save()
for step in tracer.iter[:]:
    SLOW
    first = model.layers[3].output[-1].float().sum().item()
    model.layers[5].output[:] *= 1.5
    SLOW
    model.layers[9].output[-1] += 0.5
    logits = model.logits.output.float().sum().item()
    model.logits.output[:, 11] = -1e4
    SLOW
    token = model.samples.output.item()
    SLOW
    seen.append((first, logits, token))
SLOW
"""
    told = []
    for slow in ("wait()", "pass"):
        for sampling in ({"temperature": 0}, {"temperature": 1.5, "seed": 7, "logprobs": 2}):
            answer = trace(stranger, code.replace("SLOW", slow), max_tokens=5, **sampling)
            assert answer.status_code == 200, answer.text
            choice = answer.json()["choices"][0]
            seen = choice["interventions"]["results"]["t"]["saves"]["seen"]
            told.append((choice["text"], choice["logprobs"], seen))
    assert [len(one[2]) for one in told] == [5] * 4
    assert told[:2] == told[2:]
