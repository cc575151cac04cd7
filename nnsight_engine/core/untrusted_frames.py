"""Whether code of somebody who is not trusted has led to a call, however it did: its frames' builtins tell.

The sandbox's Python asks for each call that its own code makes. A library's code calls what it was given
without asking anybody: a layer of torch made of the sender's functions and of the model's modules calls one
after the other, and a module that is given an object of the sender's hands its weights to it. So what must
not be called like that looks for itself. Envoys do; the sandbox marks what has looked at the arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, Final, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

REFUSE: Final = "refuse call!"
"""The name of what refuses such a call, among the builtins of restricted code alone: it is no identifier."""
_VETTING: Final[set[CodeType]] = set()
_OURS: Final = "nnsight_engine."


def vetting(function: Function) -> Function:
    """Mark a function that looks at the arguments before it calls an envoy."""
    code: CodeType = function.__code__
    _VETTING.add(code)
    return function


def check_call(frame: FrameType | None) -> None:
    """Refuse a call that restricted code leads to, unless the arguments were looked at.

    Args:
        frame: The caller's.

    Raises:
        Exception: What the restricted code's builtins say.
    """
    is_ours = True
    while frame is not None:
        if REFUSE in frame.f_builtins:
            frame.f_builtins[REFUSE]()
        is_ours = is_ours and str(frame.f_globals.get("__name__")).startswith(_OURS)
        if is_ours and frame.f_code in _VETTING:
            return
        frame = frame.f_back
