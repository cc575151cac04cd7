"""Ways in which a trace can go, most of them badly, and what to look at afterwards.

Each way checks that it went that way; whatever it was, the model must be as before.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from greenlet import greenlet

from nnsight_engine import save
from nnsight_engine.core.saves import SAVES
from nnsight_engine.interleaving.events import MissedProviderError, OutOfOrderError
from tests.small_models import Rows

WIDTH = 8
X = torch.linspace(-1, 1, WIDTH).unsqueeze(0)


def network(seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)))


class Unmarked:
    """What a module has beside its parameters, to be compared before and after."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.before = self.look()
        self.output = module(X)

    def look(self) -> list[dict[str, Any]]:
        return [
            {name: len(value) if isinstance(value, dict) else id(value) for name, value in vars(part).items()}
            for part in self.module.modules()
        ]

    def check(self) -> None:
        assert self.look() == self.before, "hooks or attributes are left on a module"
        assert torch.equal(self.module(X), self.output)
        assert not SAVES.depth
        assert not SAVES.marked


def num_greenlets() -> int:
    gc.collect()
    return sum(type(one) is greenlet for one in gc.get_objects())


def deep(levels: int, function: Callable[[], Any]) -> Any:
    """Call ``function`` below this many more levels of C frames."""
    return next(iter(map(lambda _: deep(levels - 1, function), [0]))) if levels else function()  # noqa: C417


class RefusedError(Exception):
    """The block's own error."""


def refuse() -> None:
    """Raise it, where a type checker would otherwise take the next invoke for unreachable."""
    raise RefusedError


def saves(model: Rows) -> None:
    with model.trace(X):
        hidden = model[1].output.save()
        out = model.output.save()
    assert hidden.shape == out.shape == (1, WIDTH)


def swaps(model: Rows) -> None:
    with model.trace(X):
        model[1].output = torch.zeros(1, WIDTH)
        model[2].input[:] = 1
        hidden = model[2].input.save()
        out = model.output.save()
    assert hidden.sum() == WIDTH
    assert out.shape == (1, WIDTH)


def stops(model: Rows) -> None:
    with model.trace(X) as tracer:
        hidden = model[1].output.save()
        tracer.stop()
    assert hidden.shape == (1, WIDTH)


def fails_in_the_block(model: Rows) -> None:
    with pytest.raises(RefusedError), model.trace(X):
        kept = model[1].output.save()
        raise RefusedError
    assert kept.shape == (1, WIDTH)


def fails_in_torch(model: Rows) -> None:
    with pytest.raises(RuntimeError), model.trace(X):
        model[1].output @ torch.zeros(3, 4)


def survives_torch(model: Rows) -> None:
    with model.trace(X):
        hidden = model[1].output
        try:
            hidden @ torch.zeros(3, 4)
        except RuntimeError:
            survived = save([1])
        model[2].output.save()
    assert survived == [1]


def fails_in_the_model(model: Rows) -> None:
    with pytest.raises(RuntimeError), model.trace(torch.zeros(1, WIDTH + 1)):
        model[1].output.save()


def makes_the_model_fail(model: Rows) -> None:
    with pytest.raises(RuntimeError), model.trace(X):
        model[1].output = torch.zeros(1, WIDTH + 1)
        model[3].output.save()


def is_out_of_order(model: Rows) -> None:
    with pytest.raises(OutOfOrderError), model.trace(X):
        model[2].output.save()
        model[1].output.save()


def misses(model: Rows) -> None:
    with pytest.raises(MissedProviderError), model.trace() as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(X):
            model[2].output.save()
            barrier()  # no other block comes


def is_cancelled(model: Rows) -> None:
    """One invoke fails while two others wait, and one of them does not take it well."""
    with pytest.raises(RefusedError), model.trace() as tracer:
        with tracer.invoke(X):
            model[3].output.save()
        with tracer.invoke(X):
            model[1].output.save()
            refuse()
        with tracer.invoke(X):
            try:
                model[3].output.save()
            except Exception as error:
                raise KeyError from error


def shares_between_invokes(model: Rows) -> None:
    with model.trace() as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(X):
            hidden = model[1].output
            barrier()
        with tracer.invoke(-X):
            barrier()
            model[1].output = hidden
            out = model.output.save()
        with tracer.invoke():
            both = model.output.save()
    assert torch.equal(out, both[1:])


def does_not_meet(model: Rows) -> None:
    with pytest.raises(MissedProviderError), model.trace() as tracer:
        barrier = tracer.barrier(3)
        with tracer.invoke(X):
            barrier()
        with tracer.invoke(-X):
            barrier()


def skips(model: Rows) -> None:
    with model.trace(X):
        model[1].skip(model[0].output)
        out = model.output.save()
    assert out.shape == (1, WIDTH)


def goes_back(model: Rows) -> None:
    with model.trace(X):
        hidden = model[1].output
        loss = model.output.sum()
        with loss.backward():
            gradient = hidden.grad.save()
    assert gradient.shape == (1, WIDTH)
    for parameter in model.parameters():
        parameter.grad = None


def fails_going_back(model: Rows) -> None:
    with pytest.raises(RefusedError), model.trace(X):
        hidden = model[1].output
        loss = model.output.sum()
        with loss.backward():
            hidden.grad.save()
            raise RefusedError
    for parameter in model.parameters():
        parameter.grad = None


def follows_in_a_session(model: Rows) -> None:
    with model.session():
        with model.trace(X):
            hidden = model[1].output
        with model.trace(-X):
            model[1].output = hidden
            out = model.output.save()
    assert out.shape == (1, WIDTH)


def caches(model: Rows) -> None:
    with model.trace(X) as tracer:
        cache = tracer.cache()
    assert len(cache) == 5


WAYS = [
    saves,
    swaps,
    stops,
    fails_in_the_block,
    fails_in_torch,
    survives_torch,
    fails_in_the_model,
    makes_the_model_fail,
    is_out_of_order,
    misses,
    is_cancelled,
    shares_between_invokes,
    does_not_meet,
    skips,
    goes_back,
    fails_going_back,
    follows_in_a_session,
    caches,
]
