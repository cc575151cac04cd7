"""Names of nnsight's documentation that its list of names lacks, and what they do."""

from __future__ import annotations

import importlib

import pytest
import torch

from nnsight_engine import NNsight, save
from nnsight_engine.compat.custom_backends import ExceptionWrapper, Globals

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
def test_documented_import(path: str) -> None:
    module, _, name = path.rpartition(".")
    assert hasattr(importlib.import_module(f"nnsight_engine.{module}"), name)


def test_documented_events_and_errors_of_blocks() -> None:
    interleaver = importlib.import_module("nnsight_engine.intervention.interleaver")
    events, mediator = interleaver.Events, interleaver.Mediator
    assert {"value", "swap", "end", "exception", "skip", "barrier"} <= {event.value for event in events}
    assert issubclass(mediator.OutOfOrderError, mediator.MissedProviderError)


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
