"""``tensor.grad`` inside a backward block: waits for the gradient of the tensor, and can replace it.

While a backward block is active, ``torch.Tensor.grad`` is a property that checks whether the code that reads
it is the block's own, and otherwise behaves as torch's attribute does.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from greenlet import getcurrent

from nnsight_engine.core.gradients import missing_graph_reason
from nnsight_engine.interleaving.events import Events

if TYPE_CHECKING:
    from nnsight_engine.interleaving.interleaver import Interleaver
    from nnsight_engine.interleaving.mediator import Mediator

_ORIGINAL: Any = torch._C.TensorBase.grad  # noqa: SLF001 - where torch defines it


class _Sessions(threading.local):
    def __init__(self) -> None:
        self.stack: list[GradientSession] = []


_sessions = _Sessions()
_lock = threading.Lock()
_open = 0


class GradientSession:
    """A backward pass with a block; it holds its tensors, whose ``id`` identifies a gradient."""

    def __init__(self, interleaver: Interleaver, mediator: Mediator) -> None:
        self.interleaver = interleaver
        self.mediator = mediator
        self._hooks: dict[int, tuple[torch.Tensor, Any]] = {}

    def provider(self, tensor: torch.Tensor) -> str:
        """Return a gradient's provider and hook the tensor; RuntimeError if that gets no gradient."""
        key = f"{id(tensor)}.grad"
        if id(tensor) not in self._hooks:
            reason = missing_graph_reason(tensor)
            if reason is not None:
                raise RuntimeError(f"this tensor gets no gradient: {reason}")

            def provide(gradient: torch.Tensor) -> torch.Tensor:
                value: torch.Tensor = self.interleaver.handle(key, gradient)
                return value

            self._hooks[id(tensor)] = (tensor, tensor.register_hook(provide))
        return key

    def __enter__(self) -> GradientSession:
        """Make ``torch.Tensor.grad`` the property, which stays until the last session of any thread ends."""
        global _open  # noqa: PLW0603 - the property is process-wide, and so is the count of its users
        with _lock:
            _open += 1
            torch.Tensor.grad = property(_read, _write, _delete, _ORIGINAL.__doc__)  # type: ignore[assignment]
        _sessions.stack.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Remove the hooks on tensors; the last session of any thread restores torch's attribute."""
        global _open  # noqa: PLW0603
        _sessions.stack.remove(self)
        for _, hook in self._hooks.values():
            hook.remove()
        with _lock:
            _open -= 1
            if not _open:
                del torch.Tensor.grad


def in_backward() -> bool:
    return bool(_sessions.stack)


def _requesting_session() -> GradientSession | None:
    """Return the innermost session if its block is the calling code; otherwise None."""
    stack = _sessions.stack
    if stack and stack[-1].mediator.worker is getcurrent():
        return stack[-1]
    return None


def _read(tensor: torch.Tensor) -> Any:
    """Return ``tensor.grad``; in a backward block, wait for the gradient first."""
    session = _requesting_session()
    if session is None:
        return _ORIGINAL.__get__(tensor)
    return session.mediator.send_event(Events.VALUE, session.provider(tensor))


def _write(tensor: torch.Tensor, value: Any) -> None:
    """Assign ``tensor.grad``; in a backward block, wait for the gradient and replace it."""
    session = _requesting_session()
    if session is None:
        _ORIGINAL.__set__(tensor, value)
    else:
        session.mediator.send_event(Events.SWAP, session.provider(tensor), None, value)


def _delete(tensor: torch.Tensor) -> None:
    _ORIGINAL.__delete__(tensor)
