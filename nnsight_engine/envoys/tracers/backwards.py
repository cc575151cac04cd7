"""``with loss.backward():``, a backward pass with a block beside it that reads and edits gradients."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from nnsight_engine.core.gradients import why_no_graph
from nnsight_engine.interleaving.gradients import GradientSession
from nnsight_engine.interleaving.interleaver import Interleaver
from nnsight_engine.interleaving.mediator import Mediator
from nnsight_engine.tracing.tracer import SITES, Tracer


class BackwardsTracer(Tracer):
    """A backward pass whose block waits for ``tensor.grad`` and may assign it.

    Gradients come in the reverse order of the forward pass, so that is the order to ask for them in. A pass
    inside a trace has an interleaver of its own: the model stands still meanwhile and provides nothing.
    """

    def __init__(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Run ``tensor.backward(*args, **kwargs)`` when the block is left."""
        super().__init__(*args, **kwargs)
        self.tensor = tensor

    def execute(self, function: Callable[[], Any]) -> None:
        """Run the pass and the block in turns, on this thread: torch's own would not share its stack.

        Raises:
            RuntimeError: There are no gradients of this tensor.
        """
        why = why_no_graph(self.tensor)
        if why is not None:
            raise RuntimeError(f"there is nothing to go back through from this tensor: {why}")
        mediator = Mediator(function, self.info)
        interleaver = Interleaver([mediator], self)
        with GradientSession(interleaver, mediator), torch.autograd.set_multithreading_enabled(mode=False):
            try:
                interleaver.run(lambda: _backward(self.tensor, *self.args, **self.kwargs))
            finally:
                interleaver.forget()  # or it would keep the block's tensors, and with them the graph


_backward: Callable[..., None] = torch.Tensor.backward


@functools.wraps(_backward)
def _traceable_backward(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if SITES.feeds_with(sys._getframe(1)):
        return BackwardsTracer(self, *args, **kwargs)
    return _backward(self, *args, **kwargs)


def install() -> None:
    """Let ``with tensor.backward():`` open a trace; any other call of it stays as it is."""
    torch.Tensor.backward = _traceable_backward  # type: ignore[method-assign] # that is the purpose
