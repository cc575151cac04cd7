"""Variables of a running frame: read before a block runs, written when its saved values are returned.

Up to Python 3.12 ``f_locals`` of a function is a copy that must be pushed back into the frame, from 3.13 on
(PEP 667) it writes through. Module-level frames, class bodies and ``exec`` use a real dict.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from types import CodeType, FrameType
from typing import Any

_CO_OPTIMIZED = 0x0001
_F_LOCALS_IS_A_COPY = sys.version_info < (3, 13)

_locals_to_fast = ctypes.pythonapi.PyFrame_LocalsToFast
_locals_to_fast.argtypes = (ctypes.py_object, ctypes.c_int)
_locals_to_fast.restype = None


def is_function(code: CodeType) -> bool:
    """Return whether ``code`` keeps its variables in fast slots, as functions do."""
    return bool(code.co_flags & _CO_OPTIMIZED)


def own_names(code: CodeType) -> frozenset[str]:
    """Return the names that are local to a function, captured ones included."""
    return frozenset((*code.co_varnames, *code.co_cellvars, *code.co_freevars))


def read_variables(frame: FrameType) -> Mapping[str, Any]:
    return frame.f_locals


def write_variables(
    frame: FrameType, values: dict[str, Any], module_names: frozenset[str] = frozenset()
) -> None:
    """Bind each name in the running frame; ``module_names``, which it declares ``global``, in its module."""
    if not values:
        return
    if module_names:
        frame.f_globals.update({name: values[name] for name in values.keys() & module_names})
        values = {name: value for name, value in values.items() if name not in module_names}
    frame.f_locals.update(values)
    if _F_LOCALS_IS_A_COPY and is_function(frame.f_code):
        _locals_to_fast(frame, 0)
