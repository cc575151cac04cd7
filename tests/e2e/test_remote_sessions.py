"""Sessions on a real server, on vLLM and on the local engine beside it: one request, values flow in it."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nnsight_engine import LanguageModel, RemoteError, save
from nnsight_engine.vllm_backend.vllm import VLLM
from tests.e2e.server import Server
from tests.families.checkpoints import write_checkpoint

TEXT, OTHER = " the tower of Paris", " I love dogs"
pytestmark = [pytest.mark.e2e, pytest.mark.heavy]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama", tmp_path_factory.mktemp("checkpoint") / "tiny-llama")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    arguments = ["--local-engine", "--dtype", "float32", "--enforce-eager", "--max-model-len", "128"]
    with Server(str(folder), arguments=arguments) as server:
        yield server


@pytest.fixture(scope="module")
def model(server: Server, folder: Path) -> VLLM:
    return VLLM(str(folder), remote=server.base_url)


def test_a_session_runs_apart_from_the_server(model: VLLM, server: Server) -> None:
    with model.session():
        found = save((os.getpid(), os.getppid(), sorted(os.environ)))
        with model.trace(TEXT):
            worker = save(os.getpid())
    assert found[1] == server.process.pid
    assert worker != found[0]
    assert not [name for name in found[2] if name.startswith(("NNSIGHT_ENGINE", "VLLM"))]


def test_prints_of_a_session_and_of_its_traces_arrive(model: VLLM, capfd: pytest.CaptureFixture[str]) -> None:
    with model.session():
        print("around", 1)  # noqa: T201 - what the test is about
        with model.trace(TEXT):
            print("within", model.logits.output.shape)  # noqa: T201 - the same
    out = capfd.readouterr().out
    assert "around 1" in out
    assert "within" in out


def test_errors_are_the_users_own(model: VLLM) -> None:
    for where in ("around", "within"):
        with pytest.raises(ZeroDivisionError) as caught:
            with model.session():
                with model.trace(TEXT):
                    before = model.logits.output.save()
                    if where == "within":
                        _ = 1 / 0  # the line
                if where == "around":
                    _ = 1 / 0  # the line
        assert before.shape[0] == 1
        lines = [entry.line for entry in traceback.extract_tb(caught.value.__traceback__)]
        assert any(line and "1 / 0  # the line" in line for line in lines)


def test_a_refused_trace_is_an_error_in_the_session(model: VLLM) -> None:
    with model.session():
        try:
            with model.trace(TEXT, temperature=-1.0):
                logits = model.logits.output.save()
        except RemoteError as error:
            said = save(str(error))
        with model.trace(TEXT):
            logits = model.logits.output.save()
    assert "temperature" in said
    assert logits.shape[0] == 1


def test_a_session_that_ends_its_process_fails_alone(model: VLLM) -> None:
    with pytest.raises(RemoteError, match="exit status 3"):
        with model.session():
            with model.trace(TEXT):
                model.logits.output.save()
            os._exit(3)
    with model.session():
        with model.trace(TEXT):
            logits = model.logits.output.save()
    assert logits.shape[0] == 1


def test_caches_edits_and_further_traces(model: VLLM) -> None:
    with model.session():
        with model.trace(TEXT) as tracer:
            cache = tracer.cache()
        with model.edit() as edited:
            model.layers[1].output[:] = 0
        with edited.trace(TEXT):
            zeroed = edited.layers[1].output.save()
        with model.trace(TEXT, remote=True):
            plain = model.layers[1].output.save()
    assert zeroed.abs().sum() == 0
    assert plain.abs().sum() > 0
    torch.testing.assert_close(cache.model.layers[1].output, plain)


def test_the_local_engine_beside_it(server: Server, folder: Path) -> None:
    model = LanguageModel(folder, remote=server.base_url)
    with model.trace(TEXT) as tracer:
        hidden = model.layers[1].output.save()
        hidden.requires_grad_(True)
        with model.lm_head.output.sum().backward():
            grad = hidden.grad.save()
    assert tracer.backend.engine == "local"
    assert grad.abs().sum() > 0
    with model.session():
        with model.trace(TEXT, remote=True):
            first = model.layers[1].output
        with model.trace(OTHER):
            model.layers[1].output[:, -1] = first[:, -1]
            logits = model.lm_head.output.save()
    assert logits.ndim == 3
    vllm = VLLM(str(folder), remote=server.base_url)
    with vllm.trace(TEXT):
        there = vllm.layers[1].output.save()
    torch.testing.assert_close(there, hidden[0].detach(), rtol=1e-3, atol=1e-3)
