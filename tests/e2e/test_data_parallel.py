"""A server with two engines: both give the model's values, a trace stays on one, counts add up, one dies."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import psutil
import pytest
import torch

import nnsight_engine
from nnsight_engine import LanguageModel, save
from nnsight_engine.vllm_backend.vllm import VLLM
from tests.e2e.answers import tensor_of
from tests.e2e.faults import engine_processes, kill
from tests.e2e.keyed import Tenant, serving_several
from tests.e2e.server import Server
from tests.families.checkpoints import write_checkpoint
from tests.monitoring import OURS, Exposition
from tests.waiting import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.heavy]

ENGINES: Final = ("0", "1")
GREEDY: Final[dict[str, Any]] = {"temperature": 0.0, "ignore_eos": True}
PROMPTS: Final = [[5, 9, 11, first] for first in range(12)]
CODE: Final = "h = model.layers[1].output.sum(-1).save()"
_COUNTED_S: Final = 1.1
"""After which the server asks the engines for their counts again."""


@dataclasses.dataclass(frozen=True)
class Served:
    """A server, one whose code is trusted, one without trust, and one who sees metrics."""

    server: Server
    trusted: Tenant
    untrusted: Tenant
    monitor: Tenant

    def metrics(self) -> Exposition:
        time.sleep(_COUNTED_S)
        return Exposition(self.monitor.get("/metrics").text)

    def served(self) -> list[float]:
        metrics = self.metrics()
        return [metrics.value("vllm:request_success_total", engine=engine) for engine in ENGINES]

    def choices(
        self, prompt: list[int], *interventions: dict[str, Any], by: Tenant | None = None, **body: Any
    ) -> list[dict[str, Any]]:
        return (by or self.trusted).choices(
            *interventions, **{"prompt": prompt, "max_tokens": 3, **GREEDY, **body}
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def served(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    arguments = ["--data-parallel-size", "2", "--max-model-len", "128"]
    with serving_several(folder, tmp_path_factory.mktemp("data"), arguments) as (server, keys):
        yield Served(server, *(Tenant(server, keys[name]) for name in ("trusted", "untrusted", "monitor")))


@pytest.fixture
def model(served: Served, folder: Path, monkeypatch: pytest.MonkeyPatch) -> VLLM:
    monkeypatch.setattr(nnsight_engine.CONFIG.API, "KEY", served.trusted.key)
    return VLLM(str(folder), remote=served.server.base_url)


@pytest.fixture(scope="module")
def local(folder: Path) -> LanguageModel:
    return LanguageModel(str(folder), dispatch=True, dtype=torch.float32)


def hidden_of(local: LanguageModel, prompt: list[int], factor: float = 1.0) -> torch.Tensor:
    """Return the output of layer 2 where that of layer 1 is multiplied."""
    with local.trace(torch.tensor([prompt])):
        local.layers[1].output[:] *= factor
        hidden = local.layers[2].output.save()
    found: torch.Tensor = hidden[0].detach()
    return found


def close(ours: Any, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(torch.as_tensor(ours), theirs, rtol=1e-3, atol=1e-4)


def test_requests_at_once_are_answered_by_both_engines_with_the_models_values(
    served: Served, local: LanguageModel
) -> None:
    before = served.served()
    vector = torch.linspace(-1, 1, local.config.hidden_size)

    def ask(prompt: list[int]) -> Any:
        scale = prompt[-1] / 4
        steer = {"op": "steer", "at": "layers.1.output", "vector": vector.tolist(), "scale": scale}
        where = {"phase": "prompt"}
        capture = {"op": "capture", "at": "layers.2.output", "where": where, "name": "c"}
        (choice,) = served.choices(prompt, steer, capture)
        (point,) = choice["interventions"]["results"]["c"]["points"].values()
        return tensor_of(point)

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        found = list(pool.map(ask, PROMPTS))
    for prompt, values in zip(PROMPTS, found, strict=True):
        with local.trace(torch.tensor([prompt])):
            local.layers[1].output[:] += vector * (prompt[-1] / 4)
            hidden = local.layers[2].output.save()
        close(values, hidden[0].detach())
    first, second = (after - start for after, start in zip(served.served(), before, strict=True))
    assert first + second == len(PROMPTS)
    assert min(first, second) >= 4


def test_both_engines_give_the_same_and_their_steps_are_added(served: Served) -> None:
    before = served.metrics()
    capture = {"op": "capture", "at": ["layers.*.output", "logits"], "name": "c"}
    first, second = (served.choices(PROMPTS[3], capture, engine=engine) for engine in ENGINES)
    assert first == second
    steps = (f"{OURS}steps_total", {"tier": "tap"})

    def counted() -> Exposition | None:  # a scrape does not wait long for busy engines
        found = served.metrics()
        return found if found.value(steps[0], **steps[1]) > before.value(steps[0], **steps[1]) else None

    after = wait_for(counted)
    assert after is not None
    for name, labels in (steps, ("vllm:request_success_total", dict[str, str]())):
        grown = after.value(name, **labels) - before.value(name, **labels)
        assert grown == (6 if labels else 2)
    for engine in ENGINES:
        name = "vllm:request_success_total"
        assert after.value(name, engine=engine) == before.value(name, engine=engine) + 1


@pytest.mark.parametrize("engine", ENGINES)
def test_choices_of_one_request_share_their_trace(engine: str, served: Served, local: LanguageModel) -> None:
    """The header does not divide a trace or move it from its engine."""
    code = {"op": "trace", "code": CODE, "name": "t"}
    sampled: dict[str, Any] = {"n": 3, "temperature": 1.0, "seed": 1, "max_tokens": 2}
    choices = served.choices(PROMPTS[2], code, engine=engine, **sampled)
    with local.trace(torch.tensor([PROMPTS[2]])):
        hidden = local.layers[1].output.save()
    assert len(choices) == 3
    for choice in choices:
        close(tensor_of(choice["interventions"]["results"]["t"]["saves"]["h"]), hidden[0].sum(-1).detach())
    capture = {"op": "capture", "at": "layers.1.output", "where": {"phase": "prompt"}, "name": "c"}
    for choice in served.choices(PROMPTS[2], capture, **sampled):
        (point,) = choice["interventions"]["results"]["c"]["points"].values()
        close(tensor_of(point), hidden[0].detach())


def test_traces_run_again_and_again_on_either_engine(
    served: Served, model: VLLM, local: LanguageModel
) -> None:
    before = served.served()
    for prompt in PROMPTS[:6]:
        with model.trace(max_tokens=2, **GREEDY) as tracer:
            barrier = tracer.barrier(2)
            with tracer.invoke(prompt):
                shared = model.layers[1].output * 2
                barrier()
            with tracer.invoke(prompt):
                barrier()
                model.layers[1].output[:] = shared
                hidden = model.layers[2].output.save()
                tokens = save([])
                for _ in tracer.iter[:]:
                    tokens.append(model.samples.output.item())
        close(hidden, hidden_of(local, prompt, 2.0))
        assert len(tokens) == 2
    assert [after - start for after, start in zip(served.served(), before, strict=True)] == [6, 6]


def test_sessions_and_edits_run_on_either_engine(model: VLLM, local: LanguageModel) -> None:
    with model.edit(name="doubled") as doubled:
        model.layers[1].output[:] *= 2.0
    for prompt in PROMPTS[:4]:
        with model.session():
            with model.trace(prompt):
                hidden = model.layers[1].output
            with model.trace(prompt):
                model.layers[1].output[:] = hidden * 2.0
                patched = model.layers[2].output.save()
        expected = hidden_of(local, prompt, 2.0)
        close(patched, expected)
        with doubled.trace(prompt):
            edited = doubled.layers[2].output.save()
        close(edited, expected)
        with model.trace(prompt, edits=["doubled"]):
            named = model.layers[2].output.save()
        close(named, expected)


def test_code_without_trust_runs_in_sandboxes_of_either_engine(served: Served) -> None:
    code = {"op": "trace", "code": CODE, "name": "t"}

    def saved(prompt: list[int], by: Tenant) -> Any:
        (choice,) = served.choices(prompt, code, by=by)
        return choice["interventions"]["results"]["t"]["saves"]["h"]

    before, num_before = served.served(), served.metrics().value(f"{OURS}sandboxes_total", event="started")
    for prompt in PROMPTS[:4]:
        assert saved(prompt, served.untrusted) == saved(prompt, served.trusted)
    assert served.metrics().value(f"{OURS}sandboxes_total", event="started") == num_before + 4
    assert all(after - start >= 2 for after, start in zip(served.served(), before, strict=True))


def test_an_engine_that_does_not_exist_is_named(served: Served) -> None:
    answer = served.trusted.complete(prompt=PROMPTS[0], engine="2")
    assert answer.status_code == 400
    assert "data_parallel_rank 2" in answer.json()["error"]["message"]


def test_a_dead_engine_is_reported_and_all_are_started_again(served: Served) -> None:
    pid = served.server.process.pid
    engines = [one for one in engine_processes(pid) if "EngineCore" in one.name()]
    assert len(engines) == len(ENGINES)
    kill(engines[1])
    wait_for(lambda: served.trusted.get("/health/ready").status_code == 503)
    assert served.trusted.complete(prompt=PROMPTS[0]).status_code == 503
    wait_for(lambda: served.trusted.get("/health/ready").is_success, 400)
    assert not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in engines)
    capture = {"op": "capture", "at": "layers.1.output", "name": "c"}
    first, second = (served.choices(PROMPTS[0], capture, engine=engine) for engine in ENGINES)
    assert first == second


def test_nothing_of_a_killed_server_stays(served: Served) -> None:
    """The last test of this server."""
    top = psutil.Process(served.server.process.pid)
    below = top.children(recursive=True)
    assert any("DPCoordinator" in "".join(one.cmdline()) for one in below)
    kill(top)
    _, alive = psutil.wait_procs(below, timeout=60)
    assert alive == []


async def test_so_does_vllm_in_this_process(
    folder: Path, local: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "enforce_eager": True}
    model = VLLM(str(folder), mode="async", data_parallel_size=2, **options)
    with model.edit(name="tripled"):
        model.layers[1].output[:] *= 3.0
    try:

        async def run(prompt: list[int]) -> torch.Tensor:
            with model.trace(prompt, max_tokens=2, edits=["tripled"], **GREEDY) as tracer:
                hidden = model.layers[2].output.save()  # noqa: F841 - read from the output's saves
            *_, last = [output async for output in tracer.backend()]
            found: torch.Tensor = last.saves["hidden"]
            return found

        for prompt, found in zip(PROMPTS, await asyncio.gather(*map(run, PROMPTS)), strict=True):
            close(found, hidden_of(local, prompt, 3.0))
        counts = await asyncio.to_thread(model.host.call, "count_events")
        assert [one["steps"]["tap"] > 0 for one in counts] == [True, True]
        held = await asyncio.to_thread(model.host.call, "count_interventions")
        assert [(one["traces"], one["edits"]) for one in held] == [(0, 1), (0, 1)]
        model.remove_edit("tripled")
        held = await asyncio.to_thread(model.host.call, "count_interventions")
        assert [one["edits"] for one in held] == [0, 0]
    finally:
        await asyncio.to_thread(model.shutdown)
