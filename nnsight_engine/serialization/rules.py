"""Hooks that decide what code in a message may do while it is decoded, and how it is transformed.

Decoding a message with code imports names, compiles source, instantiates classes and calls functions. Each of
these operations goes through ``Rules``, whose base class permits all of them. A reader that does not trust
its senders puts a subclass into its policy (``nnsight_engine.sandbox.restricted``). The rules are consulted
only for policies that allow source.
"""

from __future__ import annotations

import ast
import builtins
import importlib
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any, Final, TypeVar

Node = TypeVar("Node", bound=ast.AST)
Rewrite = Callable[[Any, str], None]
"""Transforms a definition or a block's statements in place before compilation; called with the node and
its file."""


class Rules:
    """Rules that permit everything.

    Attributes:
        rewrite: Transforms source before it is compiled; None leaves it unchanged. It is part of the key
            under which compiled code is cached, so it must be the same function object for all messages.
    """

    rewrite: Rewrite | None = None
    stops: tuple[type[BaseException], ...] = ()
    """Exceptions that terminate code whose budget is exhausted; ``told`` converts them to an error."""
    keeps_real_names: bool = True
    """Whether names resolve to the actual modules of this process; if not, ``find`` resolves them."""

    def find(self, module: str, name: str) -> Any:
        """Return the object for a qualified name in a module, or for the module itself if the name is empty.

        Raises:
            DecodeError: The name is unknown, or messages may not use it.
        """
        raise NotImplementedError

    def namespace(self, name: str, file: str | None, *, is_real: bool) -> ModuleType:
        """Return the module whose variables become the globals of received code.

        Args:
            name: The module's name.
            file: Its file at the sender; None if unknown.
            is_real: Whether the module is importable, and its actual namespace is to be used.
        """
        if is_real:
            return importlib.import_module(name)
        module = ModuleType(name)
        vars(module).update(
            {"__builtins__": builtins, "__file__": file} if file else {"__builtins__": builtins}
        )
        return module

    def check_names(self, names: Iterable[Any], *, of_cells: bool = False) -> None:
        """Refuse names that a message may not bind as globals, attributes or variables (``of_cells``)."""

    def real(self, value: Any) -> Any:
        """Return the class that a resolved name stands for; any other value unchanged."""
        return value

    def new(self, kind: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return an uninitialised instance of a class."""
        return kind.__new__(kind, *args, **kwargs)

    def member(self, owner: Any, name: str) -> Any:
        """Return the attribute of ``owner`` that a message refers to."""
        return getattr(owner, name)

    def callee(self, function: Any) -> Any:
        """Return the callable to use where a message asks to call ``function``."""
        return function

    def told(self) -> Exception:
        """Return the error that describes the stop that is currently being handled."""
        raise NotImplementedError

    def check_method(self, function: Any) -> None:
        """Refuse functions that must not be bound to a message's objects."""

    def check_class(self, kind: type) -> None:
        """Refuse the result of executing class source if it is not a newly created class."""

    def check_items(self, value: Any) -> None:
        """Refuse objects to which a message may not add items."""

    def check_state(self, value: Any, state: Any) -> None:
        """Refuse objects whose attributes a message may not set, or not to this state."""


FREE: Final = Rules()
"""For senders that are trusted with this process."""
