"""``remote="local"``: a trace goes all the way of one that is sent, and no further than this process."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from nnsight_engine import LanguageModel, save
from nnsight_engine.remote_backend.client.backend import RemoteBackend, chosen_backend
from nnsight_engine.serialization import EncodeError
from tests.families.checkpoints import write_checkpoint

TEXT, OTHER = " the tower of Paris", " I love"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def model(path: Path) -> LanguageModel:
    return LanguageModel(path, dispatch=True)


def test_parts_that_run_here_are_between_those_that_were_sent(model: LanguageModel) -> None:
    found = []
    for remote in (None, "local"):
        lock = threading.Lock()  # cannot travel
        with model.trace(TEXT, remote=remote) as tracer:
            hidden = model.layers[0].output
            with tracer.local():
                with lock:
                    doubled = hidden * 2
            model.layers[0].output = doubled
            logits = save(model.lm_head.output)
        found.append(logits)
    torch.testing.assert_close(*found)


def test_other_things_named_local_are_none_of_its_parts(model: LanguageModel) -> None:
    class Other:
        def local(self) -> contextlib.AbstractContextManager[None]:
            return contextlib.nullcontext()

    with model.trace(TEXT, remote="local"):
        made = Other()
        with made.local():
            hidden = save(model.layers[0].output)
    assert hidden.ndim == 3


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
