"""A method on every Python object, numbers and None included, such as ``hidden.save()``.

It is put into the dict behind ``object.__dict__``, and the interpreter's attribute cache is invalidated. It
is mounted once and stays, so it must not affect the rest of the program:

- A class that has an attribute of that name keeps its own.
- Classes themselves do not have it, or a dataclass field of that name would get it as its default.
  Exception: ``importlib.metadata`` of Python 3.12 and 3.13 looks up each name in the dicts of its classes'
  bases on the class, and every entry point would fail.
- ``dir`` does not list it: torch, anyio and others loop over ``dir`` while they are imported and fail.
- ``when`` hides it outside of traces, because mocks and proxies answer any name through ``__getattr__``.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib.metadata
import sys
import types
from collections.abc import Callable, Iterable
from typing import Final

Method = Callable[[object], object]
Condition = Callable[[], bool]

_LOOKS_UP_ALL_NAMES: Final[type | None] = getattr(importlib.metadata, "DeprecatedNonAbstract", None)
"""The base class of those classes in ``importlib.metadata``; None in versions of Python without it."""

_NEXT_STEP = "call the function itself instead of the method"
# A prototype of our own: setting argtypes on ctypes.pythonapi.PyType_Modified would affect all its users.
_forget_lookups = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("PyType_Modified", ctypes.pythonapi))
_dir_of_value = object.__dir__
_dir_of_class = type.__dir__


class MountError(RuntimeError):
    """The method could not be mounted on every object; the message names the reason."""


def always() -> bool:
    return True


class _Mounted:
    """The descriptor in ``object``; without ``__set__``, so that instances may have such an attribute."""

    __slots__ = ("function", "name", "when")

    def __init__(self, name: str, function: Method, when: Condition) -> None:
        self.name = name
        self.function = function
        self.when = when

    def __get__(self, instance: object, owner: type | None = None) -> Callable[[], object] | _Mounted:
        """Return the function, bound to the instance; AttributeError for a class, and while it is hidden."""
        if instance is None and owner is not types.NoneType:
            # Looked up on a class. For None itself the instance is None too, but the owner is NoneType.
            if (
                _LOOKS_UP_ALL_NAMES is not None
                and owner is not None
                and issubclass(owner, _LOOKS_UP_ALL_NAMES)
            ):
                return self
            raise AttributeError(f"type object {getattr(owner, '__name__', '?')!r} has no {self.name!r}")
        if owner is not _Probe and not self.when():
            raise AttributeError(f"{type(instance).__name__!r} object has no attribute {self.name!r}")
        if instance is None:
            return functools.partial(self.function, None)  # a method cannot be bound to None
        return types.MethodType(self.function, instance)


class _Probe:
    """Looked up before and after a change, to check that the attribute cache was invalidated."""


def mount(name: str, function: Method, *, when: Condition = always) -> None:
    """Make ``value.name()`` call ``function(value)`` for every value whose class has no such attribute.

    Another function under a mounted name replaces it. While ``when`` returns False, the attribute is
    hidden; it is called at every look-up, so it must be cheap.

    Raises:
        MountError: ``object`` has such an attribute, or this interpreter does not allow the change.
    """
    if not name.isidentifier():
        raise MountError(f"a mounted method needs an identifier as its name, got {name!r}")
    namespace = _namespace_of(object)
    present = namespace.get(name)
    if isinstance(present, _Mounted):
        if present.function is function and present.when is when:
            return
    elif present is not None:
        raise MountError(
            f"object already has {name!r} ({present!r}), which was not mounted here, "
            f"perhaps by another library that does the same; {_NEXT_STEP}"
        )
    getattr(_Probe(), name, None)  # so that a stale attribute cache is detected below
    _set_in_class(object, "__dir__", _list_value)
    _set_in_class(type, "__dir__", _list_class)
    _set_in_class(object, name, _Mounted(name, function, when))
    if getattr(getattr(_Probe(), name, None), "__func__", None) is not function:
        unmount(name)
        raise MountError(
            f"{_interpreter()} does not accept {name!r} as a method of every object; {_NEXT_STEP}"
        )


def unmount(name: str) -> None:
    """Remove a mounted method, if there is one; with the last one, ``dir`` is restored."""
    namespace = _namespace_of(object)
    if not isinstance(namespace.get(name), _Mounted):
        return
    del namespace[name]
    _forget_lookups(object)
    if not _mounted_names():
        _set_in_class(object, "__dir__", _dir_of_value)
        _set_in_class(type, "__dir__", _dir_of_class)


def _set_in_class(cls: type, name: str, value: object) -> None:
    _namespace_of(cls)[sys.intern(name)] = value
    _forget_lookups(cls)


def _namespace_of(cls: type) -> dict[str, object]:
    """Return the writable dict behind a class's ``__dict__``, the only object to which that refers."""
    referents = gc.get_referents(cls.__dict__)
    if len(referents) != 1 or not isinstance(referents[0], dict):
        raise MountError(f"{_interpreter()} hides the dict of {cls.__name__}; {_NEXT_STEP}")
    return referents[0]


def _mounted_names() -> list[str]:
    return [name for name, value in vars(object).items() if isinstance(value, _Mounted)]


def _list_value(self: object = None) -> Iterable[str]:
    attributes = getattr(self, "__dict__", {})
    return _without_mounted(_dir_of_value(self), type(self), attributes)


def _list_class(cls: type) -> Iterable[str]:
    return _without_mounted(_dir_of_class(cls), cls, {})


def _without_mounted(names: Iterable[str], cls: type, own_names: Iterable[str]) -> list[str]:
    """Return names without those of mounted methods, except names that the class or object has itself."""
    hidden = [
        name
        for name in _mounted_names()
        if name not in own_names and not any(name in vars(base) for base in cls.__mro__ if base is not object)
    ]
    return [name for name in names if name not in hidden]


def _interpreter() -> str:
    return f"{sys.implementation.name} {sys.version.split()[0]}"
