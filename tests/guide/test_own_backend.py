"""A backend of one's own decides where a compiled block runs, and when."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nnsight_engine.intervention.backends.base import Backend
from nnsight_engine.intervention.backends.execution import ExecutionBackend
from nnsight_engine.intervention.tracing.base import Tracer
from nnsight_engine.intervention.tracing.globals import Globals
from nnsight_engine.intervention.tracing.util import wrap_exception

import nnsight_engine
from nnsight_engine import NNsight

OURS = str(Path(nnsight_engine.__file__).parent)


class LocalBackend(Backend):
    """Does what ``ExecutionBackend`` is documented to do, in the same words."""

    def __call__(self, tracer: Tracer | None = None) -> Any:
        fn = super().__call__(tracer)
        assert tracer is not None
        try:
            Globals.enter()
            return tracer.execute(fn)
        except Exception as e:  # noqa: BLE001 - raised again
            raise wrap_exception(e, tracer.info) from None
        finally:
            Globals.exit()


class MyQueueBackend(Backend):
    """Submits traces to a queue, and waits for results or lets the caller poll."""

    tracer: Tracer

    def __init__(self, jobs: list[Callable[[], Any]], *, blocking: bool = True) -> None:
        super().__init__()
        self.jobs = jobs  # stands for a queue somewhere else
        self.blocking = blocking

    def __call__(self, tracer: Tracer | None = None) -> Any:
        if tracer is None:
            return self._result()
        fn = super().__call__(tracer)
        self.jobs.append(lambda: tracer.execute(fn))
        self.tracer = tracer
        return self._result() if self.blocking else None

    def _result(self) -> Any:
        try:
            Globals.enter()
            return self.jobs[-1]()
        except Exception as e:  # noqa: BLE001 - raised again
            raise wrap_exception(e, self.tracer.info) from None
        finally:
            Globals.exit()


def test_a_local_backend_is_compile_and_execute(tiny: NNsight, features: torch.Tensor) -> None:
    with tiny.trace(features, backend=LocalBackend()):
        hidden = tiny.layer1.output.save()
        output = nnsight_engine.save(tiny.output)
    assert torch.equal(hidden, tiny._module.get_submodule("layer1")(features))
    assert torch.equal(output, tiny._module(features))
    with pytest.raises(ZeroDivisionError) as caught, tiny.trace(features, backend=LocalBackend()):
        tiny.layer1.output.shape[0] / 0  # the mistake
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert frames[-1].filename == __file__
    assert "shape[0] / 0" in str(frames[-1].line)
    assert caught.value.__cause__ is None
    assert [frame.name for frame in frames if frame.filename.startswith(OURS)] in ([], ["__exit__"])


def test_a_blocking_backend_gives_values_back_when_the_job_is_done(
    tiny: NNsight, features: torch.Tensor
) -> None:
    jobs: list[Callable[[], Any]] = []
    with tiny.trace(features, backend=MyQueueBackend(jobs)):
        tiny.layer1.output[:] = 0
        output = tiny.output.save()
    assert len(jobs) == 1
    assert torch.equal(output, tiny._module.get_submodule("layer2")(torch.zeros(1, 10)))


def test_a_backend_that_does_not_wait_is_polled_later(tiny: NNsight, features: torch.Tensor) -> None:
    ran: list[str] = []
    hook = tiny._module.register_forward_hook(lambda *_: ran.append("model"))
    with tiny.trace(features, backend=MyQueueBackend([], blocking=False)) as tracer:
        tiny.layer1.output[:] = 0
    assert ran == []
    result = tracer.backend()
    hook.remove()
    assert ran == ["model"]
    assert torch.equal(result, tiny._module.get_submodule("layer2")(torch.zeros(1, 10)))


def test_edits_and_sessions_take_a_backend_too(tiny: NNsight, features: torch.Tensor) -> None:
    class Counting(ExecutionBackend):
        calls = 0

        def __call__(self, tracer: Tracer | None = None) -> Any:
            self.calls += 1
            return super().__call__(tracer)

    for_session, for_edit = Counting(), Counting()
    with tiny.session(backend=for_session):
        with tiny.trace(features):
            first = tiny.output.save()
        with tiny.trace(features):
            tiny.layer2.input = tiny.layer2.input * 0
            second = tiny.output.save()
    with tiny.edit(backend=for_edit) as edited_model:
        tiny.layer1.output[:] = 0
    with edited_model.trace(features):
        third = edited_model.output.save()
    assert (for_session.calls, for_edit.calls) == (1, 1)
    assert torch.equal(first, tiny._module(features))
    assert torch.equal(second, third)


def test_a_backend_without_a_trace_says_what_is_wrong() -> None:
    with pytest.raises(TypeError, match="nothing to give"):
        ExecutionBackend()()
