"""``tensor.grad`` inside a backward block: waits for the gradient on its way, and can replace it.

Outside such a block ``grad`` is what torch makes it. While one runs, the attribute of ``torch.Tensor`` is a
property that asks whether the code reading it is the block's own, and leaves everyone else alone.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from greenlet import getcurrent

from nnsight_engine.core.gradients import why_no_graph
from nnsight_engine.interleaving.events import Events

if TYPE_CHECKING:
    from nnsight_engine.interleaving.interleaver import Interleaver
    from nnsight_engine.interleaving.mediator import Mediator

_ORIGINAL: Any = torch._C.TensorBase.grad  # noqa: SLF001 - where torch defines it


class _Sessions(threading.local):
    """This thread's backward passes with a block beside them, innermost last."""

    def __init__(self) -> None:
        self.stack: list[GradientSession] = []


_sessions = _Sessions()
_lock = threading.Lock()
_open = 0


class GradientSession:
    """One backward pass with a block beside it; a context that makes ``grad`` wait.

    A gradient is known by its tensor's ``id``; the tensors are held, so that no id is used twice.
    """

    def __init__(self, interleaver: Interleaver, mediator: Mediator) -> None:
        """Let the block of ``mediator`` ask ``interleaver`` for gradients."""
        self.interleaver = interleaver
        self.mediator = mediator
        self._hooks: dict[int, tuple[torch.Tensor, Any]] = {}

    def provider(self, tensor: torch.Tensor) -> str:
        """Return what the gradient of ``tensor`` is called, and make torch provide it.

        Raises:
            RuntimeError: The tensor has none.
        """
        key = f"{id(tensor)}.grad"
        if id(tensor) not in self._hooks:
            why = why_no_graph(tensor)
            if why is not None:
                raise RuntimeError(f"no gradient comes to this tensor: {why}")

            def provide(gradient: torch.Tensor) -> torch.Tensor:
                value: torch.Tensor = self.interleaver.handle(key, gradient)
                return value

            self._hooks[id(tensor)] = (tensor, tensor.register_hook(provide))
        return key

    def __enter__(self) -> GradientSession:
        """Let ``grad`` wait in this thread."""
        global _open  # noqa: PLW0603 - the property is the process's, so is the count of its users
        with _lock:
            _open += 1
            torch.Tensor.grad = property(_read, _write, _delete, _ORIGINAL.__doc__)  # type: ignore[assignment]
        _sessions.stack.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave tensors and ``grad`` as they were."""
        global _open  # noqa: PLW0603
        _sessions.stack.remove(self)
        for _, hook in self._hooks.values():
            hook.remove()
        with _lock:
            _open -= 1
            if not _open:
                del torch.Tensor.grad


def in_backward() -> bool:
    """Tell whether this thread is in a backward pass with a block beside it."""
    return bool(_sessions.stack)


def _asking() -> GradientSession | None:
    """Return the session whose block is the running code."""
    stack = _sessions.stack
    if stack and stack[-1].mediator.worker is getcurrent():
        return stack[-1]
    return None


def _read(tensor: torch.Tensor) -> Any:
    session = _asking()
    if session is None:
        return _ORIGINAL.__get__(tensor)
    return session.mediator.ask(Events.VALUE, session.provider(tensor))


def _write(tensor: torch.Tensor, value: Any) -> None:
    session = _asking()
    if session is None:
        _ORIGINAL.__set__(tensor, value)
    else:
        session.mediator.ask(Events.SWAP, session.provider(tensor), None, value)


def _delete(tensor: torch.Tensor) -> None:
    _ORIGINAL.__delete__(tensor)
