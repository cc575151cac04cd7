"""Which parts of a block run here, and what of its variables stays here with them."""

from __future__ import annotations

import contextlib
import threading
from typing import Any, cast

import torch

from nnsight_engine.core.saves import save
from nnsight_engine.envoys.tracers.interleaving import InterleavingTracer
from nnsight_engine.modeling.base import NNsight
from nnsight_engine.remote_backend.sending.local_parts import LocalParts, local_parts
from nnsight_engine.remote_backend.sending.outgoing_trace import Dialect
from nnsight_engine.remote_backend.values.object_references import reference_of
from nnsight_engine.remote_backend.values.outcomes import parts_of
from nnsight_engine.serialization import decode_trace, encode_trace
from nnsight_engine.tracing.tracer import Backend, Tracer

LOCK = threading.Lock()


class Looking(Backend):
    """Finds a trace's parts, and sends nothing."""

    found: LocalParts | None = None
    message: bytes = b""

    def __call__(self, tracer: Tracer | None = None) -> Any:
        function = super().__call__(tracer)
        assert isinstance(tracer, InterleavingTracer)
        with tracer.collected(function):
            parts = parts_of(tracer)
            self.found = local_parts(parts, tracer, cast("Dialect", None))
            own = frozenset[str]() if self.found is None else self.found.own
            self.message = encode_trace(
                [part.as_sent(own) for part in parts],
                reference=lambda value: reference_of(value, tracer.model, []),
            )


def test_what_only_parts_mention_stays_here() -> None:
    model, looking = NNsight(torch.nn.Linear(2, 2)), Looking()
    lock, both, sent = threading.Lock(), torch.ones(2), 3
    with model.trace(torch.ones(1, 2), backend=looking) as tracer:
        hidden = model.output + both
        with contextlib.suppress(ValueError), tracer.local():
            with lock, LOCK:
                count = hidden.shape[0] + both.sum()
                total = count * 2
        model.output = total * sent
    assert looking.found is not None
    assert looking.found.own == {"lock", "LOCK", "count"}
    received = decode_trace(looking.message, resolve=lambda _: None)
    assert "LOCK" not in received.blocks[0].globals_ or received.blocks[0].globals_["LOCK"] is LOCK


def test_other_things_named_local_are_none_of_its_parts() -> None:
    class Other:
        def local(self) -> contextlib.AbstractContextManager[None]:
            return contextlib.nullcontext()

    model, looking, other = NNsight(torch.nn.Linear(2, 2)), Looking(), 1
    with model.trace(torch.ones(1, 2), backend=looking):
        made = Other()
        with made.local():
            save(other)
    assert looking.found is None


def test_a_name_that_one_invoke_needs_is_sent_for_all() -> None:
    model, looking, value = NNsight(torch.nn.Linear(2, 2)), Looking(), 1
    with model.trace(backend=looking) as tracer:
        with tracer.invoke(torch.ones(1, 2)):
            with tracer.local():
                kept = value  # noqa: F841 - it is what is looked at
        with tracer.invoke():
            model.output = model.output * value
    assert looking.found is not None
    assert looking.found.own == {"kept"}
