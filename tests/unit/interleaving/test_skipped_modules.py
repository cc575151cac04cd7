"""Modules that blocks skip: whose rows are replaced, and what does not run."""

from __future__ import annotations

import pytest
import torch

from tests.small_models import Rows


def test_skip_in_every_invoke_gives_each_its_own_value(layers: torch.nn.Sequential) -> None:
    model = Rows(layers)
    with model.trace() as tracer:
        with tracer.invoke(torch.zeros(1, 3)):
            model[1].skip(model[0].output * 10)
            first = model.output.save()
        with tracer.invoke(torch.ones(2, 3)):
            model[1].skip(model[0].output * 100)
            second = model.output.save()
    assert first.tolist() == [[17.0] * 3]
    assert second.tolist() == [[207.0] * 3] * 2


def test_skip_in_some_invokes_only_is_an_error_that_says_so(layers: torch.nn.Sequential) -> None:
    model = Rows(layers)
    with (
        pytest.raises(ValueError, match=r"model\.1 is skipped in 1 of 2 invokes"),
        model.trace() as tracer,
    ):
        with tracer.invoke(torch.zeros(1, 3)):
            model[1].skip(model[0].output)
        with tracer.invoke(torch.ones(2, 3)):
            model.output.save()


def test_skip_in_an_empty_invoke_skips_for_all(layers: torch.nn.Sequential) -> None:
    model = Rows(layers)
    with model.trace() as tracer:
        with tracer.invoke(torch.zeros(1, 3)):
            first = model.output.save()
        with tracer.invoke(torch.ones(2, 3)):
            second = model.output.save()
        with tracer.invoke():
            model[1].skip(model[0].output)
    assert first.tolist() == [[8.0] * 3]
    assert second.tolist() == [[9.0] * 3] * 2


def test_skipped_module_does_not_run(layers: torch.nn.Sequential) -> None:
    model = Rows(layers)
    with model.trace(torch.zeros(1, 3)):
        model[2].skip(torch.full((1, 3), -1.0))
        skipped = model[2].output.save()
        out = model.output.save()
    assert skipped.tolist() == [[-1.0] * 3]
    assert out.tolist() == [[3.0] * 3]


def test_skip_of_rows_that_do_not_fit_is_an_error(layers: torch.nn.Sequential) -> None:
    model = Rows(layers)
    with pytest.raises((ValueError, RuntimeError)), model.trace() as tracer:
        with tracer.invoke(torch.zeros(1, 3)):
            model[1].skip(torch.zeros(1, 3))
        with tracer.invoke(torch.ones(2, 3)):
            model[1].skip(torch.zeros(1, 4))
    with model.trace(torch.zeros(1, 3)):
        out = model.output.save()
    assert out.tolist() == [[10.0] * 3]
