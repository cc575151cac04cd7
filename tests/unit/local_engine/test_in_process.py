"""``remote="local"``: a trace goes all the way of one that is sent, and no further than this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nnsight_engine import LanguageModel, save
from nnsight_engine.remote_backend.client.backend import RemoteBackend
from nnsight_engine.remote_backend.client.location import chosen_backend
from nnsight_engine.serialization import EncodeError
from tests.families.checkpoints import write_checkpoint

TEXT, OTHER = " the tower of Paris", " I love"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def model(path: Path) -> LanguageModel:
    return LanguageModel(path, dispatch=True)


def reads_and_writes(model: LanguageModel, remote: str | None) -> Any:
    with model.trace(TEXT, remote=remote):
        model.model.layers[0].mlp.output[:] *= 0.5
        hidden = save(model.layers[1].output)
        logits = save(model.lm_head.output)
    return hidden, logits


def invokes(model: LanguageModel, remote: str | None) -> Any:
    with model.trace(remote=remote) as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(TEXT):
            clean = model.layers[0].output[:, -1]
            barrier()
        with tracer.invoke([OTHER, TEXT]):
            barrier()
            model.layers[0].output[:, -1] = clean
            patched = save(model.lm_head.output[:, -1])
    return patched


def generation(model: LanguageModel, remote: str | None) -> Any:
    with model.generate(TEXT, max_new_tokens=3, do_sample=False, remote=remote) as tracer:
        steps = save([])
        for _ in tracer.iter[:]:
            steps.append(model.lm_head.output[0, -1])
        tokens = save(tracer.result)
    return *steps, tokens


def gradients(model: LanguageModel, remote: str | None) -> Any:
    with model.trace(TEXT, remote=remote):
        hidden = model.layers[0].output
        hidden.requires_grad_(True)
        loss = model.lm_head.output[0, -1].logsumexp(-1)
        with loss.backward():
            gradient = save(hidden.grad)
    return gradient


def session(model: LanguageModel, remote: str | None) -> Any:
    with model.session(remote=remote):
        with model.trace(TEXT):
            hidden = model.layers[0].output[:, -1]
        with model.trace(OTHER):
            model.layers[0].output[:, -1] = hidden
            patched = save(model.lm_head.output)
    return patched


def edits(model: LanguageModel, remote: str | None) -> Any:
    with model.edit() as edited:
        model.layers[0].mlp.output[:] = 0
    with edited.trace(TEXT, remote=remote):
        logits = save(edited.lm_head.output)
    return logits


def parts_here(model: LanguageModel, remote: str | None) -> Any:
    lock = threading.Lock()  # cannot travel
    with model.trace(TEXT, remote=remote) as tracer:
        hidden = model.layers[0].output
        with tracer.local():
            with lock:
                doubled = hidden * 2
        model.layers[0].output = doubled
        logits = save(model.lm_head.output)
    return logits


@pytest.mark.parametrize(
    "trace", [reads_and_writes, invokes, generation, gradients, session, edits, parts_here]
)
def test_what_comes_home_is_what_a_trace_here_gives(
    model: LanguageModel, trace: Callable[[LanguageModel, str | None], Any]
) -> None:
    here, sent = trace(model, None), trace(model, "local")
    torch.testing.assert_close(sent, here)
    torch.testing.assert_close(trace(model, None), here, msg="the model is as it was")


def test_what_a_cache_missed_is_warned_of_each_time(model: LanguageModel) -> None:
    for _ in range(2):
        warned = pytest.warns(UserWarning, match=r"model\.model\.norm\.output, which had run before")
        with warned as caught, model.trace(TEXT, remote="local") as tracer:
            _ = model.lm_head.input
            tracer.cache(modules=[model.model.norm])
        assert [one.filename for one in caught] == [__file__]


def test_blocks_travel(model: LanguageModel) -> None:
    results: list[Any] = []
    with model.trace(TEXT, remote="local") as tracer:
        hidden = save(model.layers[0].output)
        results.append(hidden)
    assert results == [], "the list that was sent is another"
    assert isinstance(hidden, torch.Tensor)
    assert (tracer.backend.job_status, tracer.backend.engine) == ("COMPLETED", "local")
    lock = threading.Lock()
    with pytest.raises(EncodeError, match="lock"):
        with model.trace(TEXT, remote="local"):
            held = lock.locked()
            _ = save(held)
    with pytest.raises(IndexError) as caught:
        with model.trace(TEXT, remote="local"):
            _ = model.layers[0].output[99]  # the line
    assert caught.traceback[-1].frame.code.path == Path(__file__)


def test_a_model_can_run_so_by_default_and_by_its_own_names(path: Path) -> None:
    model = LanguageModel(path, remote="local", rename={"lm_head": "unembed"})
    with model.trace(TEXT):
        logits = save(model.unembed.output)
    with model.trace(TEXT, remote=False):
        here = save(model.unembed.output)
    torch.testing.assert_close(logits, here)
    wrapped = LanguageModel(model._module, tokenizer=model.tokenizer)
    with wrapped.trace(TEXT, remote="local"):
        again = save(wrapped.lm_head.output)
    torch.testing.assert_close(again, here)


def test_what_needs_a_server_says_so(model: LanguageModel) -> None:
    with pytest.raises(ValueError, match="name a server"):
        with model.trace(TEXT, remote="local", blocking=False):
            pass
    for beside in ({"remote": "http://other:8000"}, {"blocking": False}):
        with pytest.raises(ValueError, match="has no effect"):
            with model.trace(TEXT, backend=RemoteBackend("http://here:8000"), **beside):
                pass
    with pytest.raises(ValueError, match="is for LanguageModel"):
        chosen_backend(None, "local", None)


def test_models_that_no_local_engine_runs_are_refused(path: Path) -> None:
    class Mine(LanguageModel):
        pass

    with pytest.raises(TypeError, match="got Mine"):
        with Mine(path).trace(TEXT, remote="local"):
            pass
