"""What code sees of modules and classes of this process: their names, and those members that a list allows.

The objects themselves have attributes that lead everywhere, some of which Python looks up without asking any
guard (an import from a module, a class in a class statement). So code holds these views instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from nnsight_engine.sandbox.restricted.budget import refusal
from nnsight_engine.serialization.object_encoding import written_as_classes


class ModuleView:
    """A module, with the members that code may have.

    Attributes:
        path: The module's name.
        find: Returns a member by its name; raises KeyError for any other.
    """

    __slots__ = ("find", "path")

    def __init__(self, path: str, find: Callable[[str], Any]) -> None:
        """Show what ``find`` gives."""
        self.path = path
        self.find = find

    def __repr__(self) -> str:
        """Say what it is."""
        return f"<module {self.path!r} of the sandbox>"


class ClassView:
    """A class, to be called, asked for with ``isinstance``, written as a type, and perhaps derived from.

    Attributes:
        kind: The class.
        make: What calling the view does.
        members: Further members, by name: alternative constructors.
        is_base: Whether classes may derive from it.
    """

    __slots__ = ("__name__", "is_base", "kind", "make", "members")

    def __init__(
        self,
        kind: type,
        make: Callable[..., Any],
        members: Mapping[str, Any] | None = None,
        *,
        is_base: bool = False,
    ) -> None:
        """Stand for a class."""
        self.kind = kind
        self.make = make
        self.members = members or {}
        self.is_base = is_base
        self.__name__ = kind.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Make an object of the class."""
        return self.make(*args, **kwargs)

    def __getitem__(self, _arguments: Any) -> ClassView:
        """Be the class with type arguments, which mean nothing at run time."""
        return self

    def __or__(self, other: Any) -> tuple[Any, ...]:
        """Be one of two types."""
        return (self, *other) if isinstance(other, tuple) else (self, other)

    def __ror__(self, other: Any) -> tuple[Any, ...]:
        """Be one of two types."""
        return (*other, self) if isinstance(other, tuple) else (other, self)

    def __repr__(self) -> str:
        """Look like the class."""
        return f"<class {self.kind.__module__}.{self.__name__!s}>"


class KindView:
    """The type of an object that is not for making others of: it has a name, and can be compared."""

    __slots__ = ("__name__", "kind")

    def __init__(self, kind: type) -> None:
        """Stand for a class."""
        self.kind = kind
        self.__name__ = kind.__name__

    def __call__(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Refuse to make an object of the class."""
        raise refusal(f"making an object of the type `{self.__name__}`")

    def __eq__(self, other: object) -> bool:
        """Compare the classes."""
        return isinstance(other, KindView) and other.kind is self.kind

    def __hash__(self) -> int:
        """Hash the class."""
        return hash(self.kind)

    def __repr__(self) -> str:
        """Look like the class."""
        return f"<class {self.__name__!r}>"


class Base:
    """A base of classes that is no class to make objects of, such as ``typing.NamedTuple``.

    Attributes:
        base: What takes its place in a class statement.
    """

    __slots__ = ("base",)

    def __init__(self, base: Any) -> None:
        """Stand for a base."""
        self.base = base

    def __getitem__(self, _arguments: Any) -> Base:
        """Be the base with type arguments, which mean nothing at run time."""
        return self


class Lazy:
    """An iterator of this process, whose items cost a step each: some have no end.

    A class of its own and no generator, so that thousands of them, one around the other, take no stack when
    they are freed.
    """

    __slots__ = ("_next", "_step")

    def __init__(self, values: Any, step: Callable[[], bool]) -> None:
        """Give out what an iterator has."""
        self._next = iter(values).__next__
        self._step = step

    def __iter__(self) -> Lazy:
        """Be the iterator."""
        return self

    def __next__(self) -> Any:
        """Return the next item."""
        self._step()
        return self._next()


for _view in (ClassView, KindView):
    written_as_classes(_view, lambda value: value.kind)


def real(value: Any) -> Any:
    """Return the class that a view stands for; anything else as it is, and tuples of classes likewise."""
    if isinstance(value, ClassView | KindView):
        return value.kind
    if type(value) is tuple:
        return tuple(map(real, value))
    return value
