"""What code in a message may do while it is read, and what it becomes.

Reading a message with code imports names, compiles source, makes objects of classes and calls functions.
``Rules`` is where each of these happens, and as it stands it does what it is asked. A reader that does not
trust its senders gives a subclass with its policy (``nnsight_engine.sandbox.restricted``); only readers whose
policy allows source come here.
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
"""Changes a definition or a block's statements, in place, before they are compiled; given their file too."""


class Rules:
    """Rules that let everything be.

    Attributes:
        rewrite: What changes source before it is compiled; None leaves it as it is. Compiled code is kept by
            it, so it is one function for all messages.
    """

    rewrite: Rewrite | None = None
    stops: tuple[type[BaseException], ...] = ()
    """What ends code that has used up its budget; ``told`` makes an error of it."""
    keeps_real_names: bool = True
    """Whether names are what the modules of this process have under them; ``find`` decides otherwise."""

    def find(self, module: str, name: str) -> Any:
        """Return what a message means by a name in a module, or by a module if there is no name.

        Raises:
            DecodeError: It means nothing here, or is not for messages.
        """
        raise NotImplementedError

    def namespace(self, name: str, file: str | None, *, is_real: bool) -> ModuleType:
        """Return the module whose variables code is to have as its globals."""
        if is_real:
            return importlib.import_module(name)
        module = ModuleType(name)
        vars(module).update(
            {"__builtins__": builtins, "__file__": file} if file else {"__builtins__": builtins}
        )
        return module

    def check_names(self, names: Iterable[Any], *, of_cells: bool = False) -> None:
        """Refuse names that a message may not bind: globals, attributes, or variables."""

    def real(self, value: Any) -> Any:
        """Return the class that a found name stands for; anything else as it is."""
        return value

    def new(self, kind: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return an object of a class, not initialised."""
        return kind.__new__(kind, *args, **kwargs)

    def member(self, owner: Any, name: str) -> Any:
        """Return an attribute that a message names."""
        return getattr(owner, name)

    def callee(self, function: Any) -> Any:
        """Return what is called where a message asks to call this."""
        return function

    def told(self) -> Exception:
        """Return the error that tells of the stop that is being handled."""
        raise NotImplementedError

    def check_method(self, function: Any) -> None:
        """Refuse to bind what is not to be called with a message's objects."""

    def check_class(self, kind: type) -> None:
        """Refuse what source of a class made and is no new class."""

    def check_items(self, value: Any) -> None:
        """Refuse objects to which a message may add no items."""

    def check_state(self, value: Any, state: Any) -> None:
        """Refuse objects whose attributes a message may not set, or not to this."""


FREE: Final = Rules()
"""For senders that are trusted with this process."""
