"""Sandboxed keys on a real server: their blocks give what trusted ones give, and get at nothing else."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

import nnsight_engine
from nnsight_engine.vllm_backend.vllm import VLLM
from tests.e2e.keyed import KeyedServer, Tenant
from tests.monitoring import OURS, Exposition
from tests.waiting import wait_for

PROMPT = "The Eiffel Tower is in the city of"
pytestmark = pytest.mark.e2e


class Sandboxed:
    """Tenants of a server, one whose code is sandboxed and one whose is trusted, and a file not to touch."""

    def __init__(self, found: KeyedServer) -> None:
        self.url, self.canary = found.server.base_url, found.canary
        self.stranger, self.trusted = found.tenant("stranger"), found.tenant("friend")

    def complete(self, code: str | None, by: Tenant | None = None, **body: Any) -> httpx.Response:
        operations = [] if code is None else [{"op": "trace", "code": code, "name": "t"}]
        return (by or self.stranger).complete(*operations, **{"prompt": PROMPT, "max_tokens": 1, **body})

    def saves(self, code: str, by: Tenant | None = None, **body: Any) -> Any:
        answer = self.complete(code, by, **body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["interventions"]["results"]["t"]["saves"]

    def refusal(self, code: str) -> str:
        answer = self.complete(code)
        assert answer.status_code >= 400, answer.text
        message: str = answer.json()["error"]["message"]
        return message


@pytest.fixture(scope="module")
def sandboxed(keyed_server: KeyedServer) -> Iterator[Sandboxed]:
    untouched, found = keyed_server.canary.read_text(), Sandboxed(keyed_server)
    yield found
    assert found.trusted.get("/v1/status").status_code == 200
    assert found.canary.read_text() == untouched


BLOCKS = {
    "read": "h = model.layers[5].output.float().save()",
    "last": "h = model.layers[5].output[-1].float().save()",
    "edit": "model.layers[5].output[:] *= 1.5\nh = model.layers[9].output.float().save()",
    "embeddings": (
        "model.embed.output[:] *= 2\nh = [model.layers[0].input.float(), model.logits.output.float()].save()"
    ),
    "edit and look inside": (
        "model.layers[5].output[:] *= 2\nmodel.layers[6].output = model.layers[6].output + 1\n"
        "h = [model.layers[8].mlp.output.float(), model.logits.output.float()].save()"
    ),
    "replace": "l = model.layers[3]\nl.output = l.output * 0.5\nh = model.logits.output.float().save()",
    "lens": "h = model.lm_head(model.model.norm(model.layers[7].output)).argmax(-1).save()",
    "heads": "model.layers[4].attn.heads[:, 0] = 0\nh = model.logits.output.float().save()",
    "module": "h = model.model.layers[2].mlp.output.float().save()",
    "skip": "model.layers[2].mlp.skip(model.layers[2].mlp.input * 0)\nh = model.logits.output.float().save()",
    "skip the first": "l = model.layers[0]\nl.skip(l.input * 2)\nh = model.logits.output.float().save()",
    "steps": "h = [].save()\nfor step in tracer.iter[:]:\n    h.append(model.samples.output.item())",
    "logits": "model.logits.output[:, 11] = 1e4\nh = model.samples.output.save()",
    "random": "h = torch.rand(3).save()",
}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_give_what_trusted_ones_give(name: str, sandboxed: Sandboxed) -> None:
    one, other = (
        sandboxed.saves(BLOCKS[name], by, max_tokens=4 if name == "steps" else 1)
        for by in (sandboxed.stranger, sandboxed.trusted)
    )
    if name == "random":  # each trace draws its own
        assert one.keys() == other.keys()
        return
    assert one == other


def test_traces_of_the_library_run_there_too(
    sandboxed: Sandboxed, bundled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = VLLM(str(bundled), remote=sandboxed.url)
    found = []
    for tenant in (sandboxed.stranger, sandboxed.trusted):
        monkeypatch.setattr(nnsight_engine.CONFIG.API, "KEY", tenant.key)
        with model.trace(temperature=0.0, max_tokens=2) as tracer:
            barrier = tracer.barrier(2)
            with tracer.invoke(PROMPT):
                clean = model.layers[6].output[-1].clone()
                barrier()
                first = model.logits.output.float().save()
            with tracer.invoke("one two three"):
                cache = tracer.cache(modules=[model.model.layers[2]])
                barrier()
                model.layers[6].output[-1] = clean
                second = model.logits.output.float().save()
        found.append((first, second))
        assert cache.model.layers[2].output[0].shape == (3, 576)
    assert torch.equal(found[0][0], found[1][0])
    assert torch.allclose(found[0][1], found[1][1], atol=1e-2)


def test_what_a_cache_missed_is_warned_of_over_the_network(
    sandboxed: Sandboxed, bundled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = VLLM(str(bundled), remote=sandboxed.url)
    for tenant in (sandboxed.stranger, sandboxed.trusted):
        monkeypatch.setattr(nnsight_engine.CONFIG.API, "KEY", tenant.key)
        warned = pytest.warns(UserWarning, match=r"layers\.2\.output, which had run before")
        with warned as caught, model.trace(PROMPT, temperature=0.0, max_tokens=1) as tracer:
            _ = model.layers[6].output
            cache = tracer.cache(modules=[model.model.layers[2], model.layers[8], model.model.norm])
        assert "layers.8" not in str(caught[0].message)
        assert caught[0].filename == __file__
        assert set(cache) == {"model.model.layers.8", "model.model.norm"}


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("h = model.lm_head.weight.save()", "weight"),
        ("h = model.model.layers[0].mlp.gate_up_proj.weight.sum().save()", "weight"),
        ("h = model.model.layers[0].self_attn(torch.zeros(1, 576)).save()", "cannot be called|called with"),
        ("h = model.model.embed_tokens(torch.tensor([10**9])).save()", "tokens are from 0"),
        ("h = model.model.norm(torch.zeros(3, 7, dtype=torch.bfloat16)).save()", "576"),
        ("h = model.model.norm(model.layers[5].output, hook=True).save()", "hook=True"),
        ("h = model.layers[5].output.nothing.save()", "nothing"),
        ("model.samples.output[:] = 10**9", "takes integers from 0"),
        ("model.model.embed_tokens.input[:] = -1", "takes integers from 0"),
        ("model.model.layers[0].self_attn.rotary_emb.input[:] = 2**40", "integers"),
        ("h = model.layers[5].output\nraise ValueError('mine')", "mine"),
    ],
)
def test_what_there_is_not_is_said(code: str, said: str, sandboxed: Sandboxed) -> None:
    message = sandboxed.refusal(code)
    assert any(part in message for part in said.split("|")), message


HOSTILE = {
    "loop": "while True: pass",
    "deaf": "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    "memory": "keep = []\nwhile True:\n    keep.append(torch.ones(10_000_000))",
    "file": "import os\nh = save(os.listdir('/'))",
    "walk": "h = save([c.__name__ for c in ().__class__.__base__.__subclasses__()])\nopen('/etc/passwd')",
    "exit": "import os\nos._exit(3)",
    "crash": "import ctypes\nctypes.string_at(0)",
    "torch-loop": "a = torch.ones(2000, 2000)\nwhile True: a = a @ a",
    "loop-in-one-call": "h = save(sum(range(10**12)))",
    "regular-expression": "exec(\"import re\\nre.match('(a+)+$', 'a' * 64 + 'b')\")",
    "huge-number": "h = save(10**10**9 > 1)",
    "recursion": "def f(n): return f(n) + 1\nh = save(f(1))",
    "deep-recursion": "exec('import sys\\nsys.setrecursionlimit(10**9)\\nf = lambda: f()\\nf()')",
    "many-processes": "exec('import os\\nwhile True: os.fork()')",
    "delete-everything": "exec('import shutil\\nshutil.rmtree(\"/\")')",
    "large-result": "h = [torch.zeros(2**20) for _ in range(400)].save()",
    "forged-error": (
        "exec('from nnsight_engine.sandbox.errors import SandboxUnavailableError')\n"
        "exec('raise SandboxUnavailableError(1)')"
    ),
    "class-body": "class A:\n    while True: pass\nh = save(A)",
}
"""Code that `exec` hides from the checker, which is not what holds it off, among it."""


@pytest.mark.parametrize("name", HOSTILE)
def test_the_hostile_fail_alone(name: str, sandboxed: Sandboxed) -> None:
    before = sandboxed.complete(None).json()["choices"][0]["text"]
    answer = sandboxed.complete(HOSTILE[name])
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "trace_failed"), answer.text
    assert sandboxed.complete(None).json()["choices"][0]["text"] == before
    assert sandboxed.saves("h = model.layers[1].output.shape[-1]\nh = save(h)") == {"h": 576}


def test_metrics_tell_of_sandboxes_and_of_those_that_were_killed(
    sandboxed: Sandboxed, keyed_server: KeyedServer
) -> None:
    monitor = keyed_server.tenant("monitor")

    def told() -> Exposition:
        time.sleep(1.1)  # the engine is asked once a second
        return Exposition(monitor.get("/metrics").text)

    def grown(event: str) -> float:
        name = f"{OURS}sandboxes_total"
        return after.value(name, event=event) - before.value(name, event=event)

    before = after = told()
    sandboxed.saves("h = save(1)")
    # One call that lasts for longer than a step's time: nothing inside the process can end it.
    said = sandboxed.refusal("a = torch.ones(6000, 6000)\nh = save((a @ a).sum())")

    def is_counted() -> bool:
        nonlocal after
        after = told()
        return grown("killed") >= 1

    wait_for(is_counted)
    assert (grown("started"), grown("killed"), grown("refused")) == (2, 1, 0), said
    spent = f"{OURS}step_intervention_seconds_sum"
    assert after.value(spent) > before.value(spent)
    assert "stranger" not in after.text


def test_what_a_block_prints_without_end_is_cut(sandboxed: Sandboxed) -> None:
    code = "for _ in range(200): print('a' * 10**6)\nh = save(1)"
    answer = sandboxed.complete(code)
    assert len(answer.content) < 2**22
    assert sandboxed.saves("h = save(1)") == {"h": 1}


def test_a_process_is_used_again_unless_a_block_has_left_something_in_it(sandboxed: Sandboxed) -> None:
    code = "h = save([eval(\"__import__('os').getpid()\"), str(torch.get_default_dtype())])"
    first, second = sandboxed.saves(code)["h"], sandboxed.saves(code)["h"]
    assert first == second
    sandboxed.saves("torch.set_default_dtype(torch.float64)\nh = save(1)")
    third = sandboxed.saves(code)["h"]
    assert third[0] != first[0]
    assert third[1] == "torch.float32"


def test_one_tenants_process_is_not_anothers(sandboxed: Sandboxed, bundled: Path) -> None:
    """What a block leaves behind in its process is met by its own tenant at most."""
    sandboxed.complete("torch.mine = 1\nh = save(1)")
    answer = sandboxed.complete("h = save(hasattr(torch, 'mine'))", sandboxed.trusted)
    assert answer.json()["choices"][0]["interventions"]["results"]["t"]["saves"] == {"h": False}


def test_jobs_of_sandboxed_keys_run_sandboxed(
    sandboxed: Sandboxed, bundled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nnsight_engine.CONFIG.API, "KEY", sandboxed.stranger.key)
    model = VLLM(str(bundled), remote=sandboxed.url)
    with model.trace(PROMPT, blocking=False) as tracer:
        weight = model.lm_head.weight.save()  # noqa: F841 - nobody gets it
    with pytest.raises(Exception, match="weight"):
        tracer.backend.wait()


def test_more_prompts_than_there_are_sandboxes_wait_for_one(sandboxed: Sandboxed) -> None:
    code, prompts = "h = model.samples.output.save()", [f"{PROMPT} {number}" for number in range(10)]
    with ThreadPoolExecutor() as pool:
        whole = pool.submit(sandboxed.complete, code, prompt=prompts, max_tokens=2)
        streamed = pool.submit(sandboxed.complete, code, prompt=prompts, max_tokens=2, stream=True)
        single = [pool.submit(sandboxed.complete, code) for _ in range(4)]
        assert [one.result().status_code for one in single] == [200] * 4
        choices = whole.result().json()["choices"]
    assert [set(choice["interventions"]["results"]["t"]["saves"]) for choice in choices] == [{"h"}] * 10
    assert "error" not in streamed.result().text
    assert streamed.result().text.count('"saves":{"h"') >= 10
    left = sandboxed.complete("while True: pass", prompt=prompts)  # all of which go
    assert left.json()["error"]["code"] == "trace_failed"
    assert sandboxed.complete(code, prompt=prompts).status_code == 200
