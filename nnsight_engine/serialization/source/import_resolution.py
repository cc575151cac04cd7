"""Decision whether a function, class or module can be sent by name: if installed, not the user's own."""

from __future__ import annotations

import functools
import operator
import os
import site
import sys
import sysconfig
import types
import typing
import weakref
from types import ModuleType
from typing import Any, Final

import torch

_OURS = __name__.partition(".")[0]
MOVED: Final = {"pathlib._local": "pathlib"}
"""Modules of one Python version whose names are found elsewhere in all versions; ``pathlib._local`` is of
3.13."""
_by_value: set[str] = set()
RECEIVED: weakref.WeakSet[type] = weakref.WeakSet()
"""Classes that were received as source: their instances are sent back by name, to the side that has the
class."""


def register_by_value(module: ModuleType | str) -> None:
    """Send definitions of a module and its submodules as source from now on."""
    _by_value.add(module if isinstance(module, str) else module.__name__)


def unregister_by_value(module: ModuleType | str) -> None:
    """Revert ``register_by_value``: send definitions of a module by name again if it is installed."""
    _by_value.discard(module if isinstance(module, str) else module.__name__)


def is_importable(module: str) -> bool:
    """Return whether the other side has a module: Python's, installed or ours, not the user's own."""
    top = module.partition(".")[0]
    if top == "__main__" or any(module == name or module.startswith(f"{name}.") for name in _by_value):
        return False
    if top in sys.stdlib_module_names or top == _OURS:
        return True
    loaded = sys.modules.get(top)
    if loaded is None:
        return False
    file = getattr(loaded, "__file__", None)
    files = [file] if file else list(getattr(loaded, "__path__", ()))
    return bool(files) and all(map(_is_installed, files))


def name_of(value: Any) -> tuple[str, str] | None:
    """Return the module and qualified name under which the other side finds exactly this object, or None."""
    module = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    if not isinstance(name, str) or "<" in name:
        return None
    if isinstance(value, type) and value in RECEIVED and isinstance(module, str):
        return module, name
    candidates = [MOVED.get(module, module)] if isinstance(module, str) else []
    if not isinstance(value, types.FunctionType):  # the ``__module__`` of a C function may be missing
        candidates += [module_of_c.__name__ for module_of_c in _PLACES_OF_C]
    for candidate in candidates:
        for spelled in dict.fromkeys((name, name.rpartition(".")[2])):
            if is_importable(candidate) and lookup(candidate, spelled) is value:
                return candidate, spelled
    return None


def lookup(module: str, name: str) -> Any:
    """Return what a loaded module has under a name, which may be dotted; None if it has nothing."""
    loaded = sys.modules.get(module)
    try:
        return operator.attrgetter(name)(loaded)
    except AttributeError:
        return None


_PLACES_OF_C: tuple[ModuleType, ...] = (
    torch,
    torch.nn.functional,
    torch.linalg,
    torch.fft,
    torch.special,
    torch._C,  # noqa: SLF001 - the module that torch's methods report
    types,
    typing,
)


@functools.lru_cache(maxsize=4096)
def _is_installed(file: str) -> bool:
    return os.path.realpath(file).startswith(_installed_folders())


@functools.cache
def _installed_folders() -> tuple[str, ...]:
    names = ("purelib", "platlib", "stdlib", "platstdlib")
    folders = {sysconfig.get_paths()[name] for name in names} | {
        *site.getsitepackages(),
        site.getusersitepackages(),
    }
    return tuple(os.path.realpath(folder) + os.sep for folder in folders if folder)
