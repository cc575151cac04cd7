"""Detection of calls that untrusted code leads to, directly or through a library, by the frames' builtins.

The sandbox's Python checks each call that the untrusted code itself makes. A library's code calls the
objects that it was given without a check: a torch layer made of the client's functions and the model's
modules calls one after the other, and a module that is given an object of the client passes its weights to
it. So functions that must not be called in this way check for themselves. Envoys do; the sandbox marks the
functions that have checked the arguments (``vetting``).
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, Final, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

REFUSE: Final = "refuse call!"
"""Key of the function that rejects such a call, in the builtins of restricted code only; not an identifier.
"""
_VETTING: Final[set[CodeType]] = set()
_OURS: Final = "nnsight_engine."


def vetting(function: Function) -> Function:
    """Mark a function that checks the arguments before it calls an envoy."""
    code: CodeType = function.__code__
    _VETTING.add(code)
    return function


def check_call(frame: FrameType | None) -> None:
    """Reject a call that restricted code leads to, unless its arguments were checked (see ``vetting``).

    Args:
        frame: The caller's.

    Raises:
        Exception: The error that the restricted code's builtins raise.
    """
    is_ours = True
    while frame is not None:
        if REFUSE in frame.f_builtins:
            frame.f_builtins[REFUSE]()
        is_ours = is_ours and str(frame.f_globals.get("__name__")).startswith(_OURS)
        if is_ours and frame.f_code in _VETTING:
            return
        frame = frame.f_back
