from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from nnsight_engine.core.gradients import missing_graph_reason
from nnsight_engine.interleaving.gradients import GradientSession
from nnsight_engine.interleaving.interleaver import Interleaver
from nnsight_engine.interleaving.mediator import Mediator
from nnsight_engine.tracing.tracer import SITES, Tracer


class BackwardsTracer(Tracer):
    """A backward pass whose block waits for ``tensor.grad`` and may assign it.

    Gradients arrive in the reverse order of the forward pass and must be requested in that order. A pass
    inside a trace has its own interleaver: the model is paused meanwhile and provides no values.
    """

    def __init__(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Prepare ``tensor.backward(*args, **kwargs)``, which runs when the block is left."""
        super().__init__(*args, **kwargs)
        self.tensor = tensor

    def execute(self, function: Callable[[], Any]) -> None:
        """Run pass and block alternately, on this thread; torch's autograd threads have other stacks."""
        why = missing_graph_reason(self.tensor)
        if why is not None:
            raise RuntimeError(f"there is nothing to go back through from this tensor: {why}")
        mediator = Mediator(function, self.info)
        interleaver = Interleaver([mediator], self)
        with GradientSession(interleaver, mediator), torch.autograd.set_multithreading_enabled(mode=False):
            try:
                interleaver.run(lambda: _backward(self.tensor, *self.args, **self.kwargs))
            finally:
                # otherwise it would keep the block's tensors alive, and with them the graph
                interleaver.forget()


_backward: Callable[..., None] = torch.Tensor.backward


@functools.wraps(_backward)
def _traceable_backward(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if SITES.feeds_with(sys._getframe(1)):
        return BackwardsTracer(self, *args, **kwargs)
    return _backward(self, *args, **kwargs)


def install() -> None:
    """Patch ``torch.Tensor.backward``: ``with tensor.backward():`` opens a trace, other calls do not."""
    torch.Tensor.backward = _traceable_backward  # type: ignore[method-assign] # the patch is intended
