"""Backends, tracers and saves written as the documentation of nnsight describes."""

from __future__ import annotations

import importlib
import linecache
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from nnsight_engine import CONFIG, NNsight, save
from nnsight_engine.compat.exceptions import ExceptionWrapper, wrap_exception
from nnsight_engine.compat.globals import Globals
from nnsight_engine.envoys.tracers.interleaving import InterleavingTracer
from nnsight_engine.tracing.tracer import Backend, ExecutionBackend, Tracer

X = torch.ones(1, 5)


@pytest.fixture
def model() -> NNsight:
    return NNsight(torch.nn.Sequential(torch.nn.Linear(5, 10), torch.nn.Linear(10, 2)))


@pytest.mark.parametrize(
    "path",
    [
        "modeling.huggingface.HuggingFaceModel",
        "modeling.transformers.TransformersModel",
        "intervention.batching.Batchable",
        "intervention.batching.Batcher",
        "intervention.tracing.globals.Globals",
        "intervention.tracing.globals.save",
    ],
)
def test_a_documented_import_that_is_not_in_the_list_of_names(path: str) -> None:
    module, _, name = path.rpartition(".")
    assert hasattr(importlib.import_module(f"nnsight_engine.{module}"), name)


def test_documented_events_and_errors_of_blocks() -> None:
    interleaver = importlib.import_module("nnsight_engine.intervention.interleaver")
    events, mediator = interleaver.Events, interleaver.Mediator
    assert {"value", "swap", "end", "exception", "skip", "barrier"} <= {event.value for event in events}
    assert issubclass(mediator.OutOfOrderError, mediator.MissedProviderError)


class DocumentedBackend(Backend):
    """The local backend, written out as the documentation does."""

    def __call__(self, tracer: Tracer | None = None) -> Any:
        fn = super().__call__(tracer)
        assert tracer is not None
        try:
            Globals.enter()
            return tracer.execute(fn)
        except Exception as e:  # noqa: BLE001 - as documented
            raise wrap_exception(e, tracer.info) from None
        finally:
            Globals.exit()


class QueueBackend(Backend):
    """Submits a block, and runs it when it is polled."""

    def __init__(self) -> None:
        self.job: Any = None

    def __call__(self, tracer: Tracer | None = None) -> Any:
        if tracer is None:
            return self.job()
        fn = super().__call__(tracer)
        self.job = lambda: (tracer.info.filename, tracer.info.start_line, fn)
        return None


@pytest.mark.parametrize("backend", [DocumentedBackend, ExecutionBackend])
def test_a_custom_backend_runs_the_block_and_values_come_back(model: NNsight, backend: type[Backend]) -> None:
    lost = None
    with model.trace(X, backend=backend()):
        hidden = model[0].output.save()
        lost = model[1].output
    assert hidden.shape == (1, 10)
    assert lost is None
    assert Globals.stack == 0


def test_a_custom_backend_raises_the_users_error_at_the_users_line(model: NNsight) -> None:
    with pytest.raises(IndexError) as caught, model.trace(X, backend=DocumentedBackend()):  # noqa: PT012 - one block
        kept = model[0].output.save()
        model[1].output[100].save()
    shown = traceback.extract_tb(caught.value.__traceback__)
    assert shown[-1].line == "model[1].output[100].save()"
    ours = str(Path(save.__code__.co_filename).parents[1])
    assert not [entry for entry in shown[1:] if entry.filename.startswith(ours) and entry.name != "__exit__"]
    assert kept.shape == (1, 10)


def test_debug_mode_shows_every_frame(model: NNsight, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CONFIG.APP, "DEBUG", True)
    with pytest.raises(IndexError) as caught, model.trace(X, backend=DocumentedBackend()):
        model[1].output[100].save()
    names = [entry.name for entry in traceback.extract_tb(caught.value.__traceback__)]
    assert "execute" in names


def test_backend_that_does_not_wait_is_polled_through_the_tracer(model: NNsight) -> None:
    with model.trace(X, backend=QueueBackend()) as tracer:
        hidden = model[0].output.save()
    filename, line, function = tracer.backend()
    assert linecache.getline(filename, line).strip() == "hidden = model[0].output.save()"
    assert callable(function)
    with pytest.raises(NameError):
        _ = hidden


def test_a_custom_tracer(model: NNsight) -> None:
    class Twice(InterleavingTracer):
        def execute(self, function: Any) -> Any:
            runs.append(self.info.source)
            return super().execute(function)

    runs: list[Any] = []
    with model.trace(X, tracer_cls=Twice):
        hidden = model[0].output.save()
    assert hidden.shape == (1, 10)
    assert [[line.strip() for line in lines] for lines in runs] == [["hidden = model[0].output.save()"]]


def test_saves_are_seen_as_ids(model: NNsight) -> None:
    with model.trace(X):
        hidden = save(model[0].output)
        other = model[1].output
        marked = save(
            (id(hidden) in Globals.saves, id(other) in Globals.saves, len(Globals.saves), Globals.stack)
        )
    assert marked[:2] == (True, False)
    assert marked[2:] == (1, 1)
    assert (len(Globals.saves), Globals.stack) == (0, 0)


def test_saving_and_forgetting_by_id(model: NNsight) -> None:
    forgotten = None
    with model.trace(X):
        kept = model[0].output
        Globals.saves.add(id(kept))
        forgotten = save(model[1].output)
        Globals.saves.discard(id(forgotten))
        ids = save(Globals.saves | set())
    assert kept.shape == (1, 10)
    assert forgotten is None
    assert ids == {id(kept)}


@pytest.fixture
def edited_file(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "edited.py"
    linecache.checkcache()


def loaded(path: Path, text: str) -> ModuleType:
    path.write_text(text)
    module = ModuleType("edited")
    exec(compile(text, str(path), "exec"), module.__dict__)
    return module


def test_clearing_the_cache_lets_changed_source_be_read(model: NNsight, edited_file: Path) -> None:
    text = "def run(net, x):\n    with net.trace(x):\n        out = net[{}].output.save()\n    return out\n"
    assert loaded(edited_file, text.format(0)).run(model, X).shape == (1, 10)
    changed = loaded(edited_file, "# further down now\n" + text.format("-1"))
    Globals.cache.clear()
    assert changed.run(model, X).shape == (1, 2)


def test_an_error_is_itself_and_no_wrapper_of_it(model: NNsight) -> None:
    with pytest.raises(ZeroDivisionError) as caught, model.trace(X):
        _ = 1 / 0
    assert not isinstance(caught.value, ExceptionWrapper)
    with model.trace(X) as tracer:
        pass
    block = tracer.info
    with pytest.raises(ExceptionWrapper, match="ZeroDivisionError: division by zero") as wrapped:
        raise ExceptionWrapper(block, caught.value)
    wrapped.value.set_info(block)
    assert wrapped.value.original is caught.value
    assert wrapped.value.infos == [block, block]
