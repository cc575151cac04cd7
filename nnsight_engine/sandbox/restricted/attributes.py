"""Attributes, read and assigned through guards: by the tables, or by whose object it is.

Of the code's own classes and modules everything is for it but the names that Python itself uses. Of other
types, what ``tables`` lists. Of the model's side, what ``engine`` lets through.
"""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

import numpy as np
import torch

from nnsight_engine.core.gradients import set_requires_grad
from nnsight_engine.core.saves import save
from nnsight_engine.sandbox.restricted.budget import Budget, FuelMeter, refusal
from nnsight_engine.sandbox.restricted.engine import (
    NOTHING,
    TOKENIZERS_CALLS,
    given,
    is_point,
    is_tokenizer,
    of_engine,
)
from nnsight_engine.sandbox.restricted.layers import (
    charge_layer,
    check_defined,
    check_settable,
    is_hidden,
    made_by_torch,
)
from nnsight_engine.sandbox.restricted.names import is_bindable
from nnsight_engine.sandbox.restricted.sizes import Sizer, size_of
from nnsight_engine.sandbox.restricted.tables import PLAIN, SETTABLE, Rules, rules_of
from nnsight_engine.sandbox.restricted.tokenizers import Tokenizing
from nnsight_engine.sandbox.restricted.views import Base, ClassView, KindView, ModuleView

_NAMED_PART: Final = type(vars(collections.namedtuple("_NamedPart", "part"))["part"])
_OF_SUPER: Final = frozenset({"__init__", "__repr__", "__str__", "__eq__", "__hash__", "__post_init__"})
CLASSES: Final = frozenset({float, bool, complex, slice})
"""Classes of Python and numpy that code has as they are."""


class AttributeRules:
    """The attributes that one message's code may have.

    Attributes:
        meter: What is left of its budget.
        sizer: Measures results before they are made.
        step: Counts a step.
        own: The classes that it defined.
        modules: Its modules, by identity.
        classes: Classes of this process that it may call, with what stands for each.
    """

    def __init__(self, budget: Budget, engine: Mapping[type, Collection[str]]) -> None:
        """Begin with no code.

        Args:
            budget: What the code may use.
            engine: Further types of objects that the code is given, and what it may have of them.
        """
        self.meter = FuelMeter(budget)
        self.sizer = Sizer(self.meter)
        self.step = self.meter.counter()
        self.own: set[type] = set()
        self.modules: dict[int, types.ModuleType] = {}
        self.classes: dict[type, Any] = {}
        self._engine = engine
        self._rules: dict[type, Rules] = {}

    def get(self, owner: Any, name: str) -> Any:
        """Return an attribute.

        Raises:
            SandboxError: It is none for code.
            AttributeError: There is none.
        """
        kind = type(owner)
        rules = self._rules.get(kind)
        if rules is None:
            rules = self._learn(kind)
        rule = rules.get(name)
        if rule is PLAIN:
            return getattr(owner, name)
        if rule is None:
            return self._slowly(owner, kind, name)
        return rule(self, owner, name)

    def _learn(self, kind: type) -> Rules:
        rules: Rules = {} if kind in self.own else rules_of(kind)
        if issubclass(kind, type):
            rules = {}
        for base, names in self._engine.items():
            if issubclass(kind, base):
                rules = rules | dict.fromkeys(names, PLAIN)
        self._rules[kind] = rules
        return rules

    def _slowly(self, owner: Any, kind: type, name: str) -> Any:  # noqa: PLR0911 - one for each kind of object
        if kind is ModuleView:
            return self.of_view(owner, name)
        if kind in self.own:
            return self._of_own(owner, kind, name)
        if issubclass(kind, type):
            return self._of_class(owner, name)
        if name == "save":
            return functools.partial(self.save, owner)
        if name in TOKENIZERS_CALLS and is_tokenizer(kind):
            return Tokenizing(self, owner, name)
        found = of_engine(owner, kind, name)
        if found is not NOTHING:
            return found
        if kind is types.ModuleType and id(owner) in self.modules and is_bindable(name):
            return getattr(owner, name)
        if kind is ClassView:
            return self._of_class_view(owner, name)
        if (
            issubclass(kind, tuple)
            and kind.__module__.partition(".")[0] in {"torch", "numpy"}
            and is_bindable(name)
        ):
            return self._of_results(owner, kind, name)
        raise self._refused(owner, kind, name)

    def _of_results(self, owner: Any, kind: type, name: str) -> Any:
        """Return a part of a tuple with names, such as ``topk`` returns."""
        if isinstance(vars(kind).get(name), types.MemberDescriptorType | property | _NAMED_PART):
            return getattr(owner, name)
        raise self._refused(owner, kind, name)

    def _refused(self, owner: Any, kind: type, name: str) -> Exception:
        """Return the error for an attribute that code cannot have, or that is not there."""
        there = any(name in vars(base) for base in kind.__mro__) or name in getattr(owner, "__dict__", ())
        if not there and is_bindable(name) and not hasattr(kind, "__getattr__"):
            return AttributeError(f"{kind.__name__!r} object has no attribute {name!r}", name=name)
        return refusal(f"the attribute `{name}` of a `{kind.__name__}`")

    def of_view(self, view: ModuleView, name: str) -> Any:
        """Return a member of a module."""
        try:
            return view.find(name)
        except KeyError:
            raise refusal(f"`{view.path}.{name}`") from None

    def _of_own(self, owner: Any, kind: type, name: str) -> Any:
        """Return an attribute of an object of the code's own class."""
        if not is_bindable(name) or is_hidden(kind, name):
            if name == "__name__":
                raise AttributeError(name)
            raise refusal(f"the attribute `{name}`")
        for base in kind.__mro__:
            if name in vars(base):
                if base in self.own:
                    return getattr(owner, name)
                break
        else:
            if name == "save" and name not in getattr(owner, "__dict__", ()):
                return functools.partial(self.save, owner)
            return getattr(owner, name)
        if base is object:
            return functools.partial(self.save, owner)
        rule = rules_of(kind).get(name)
        if rule is PLAIN:
            return getattr(owner, name)
        if rule is None:
            raise self._refused(owner, kind, name)
        return rule(self, owner, name)

    def _of_class(self, kind: type, name: str) -> Any:
        """Return an attribute of one of the code's own classes, or of an error's."""
        if name == "__name__":
            return str(kind.__name__)
        if kind in self.own and is_bindable(name) and not is_hidden(kind, name):
            for base in kind.__mro__:
                if name in vars(base):
                    if base in self.own:
                        return getattr(kind, name)
                    break
            else:
                raise AttributeError(f"type object {kind.__name__!r} has no attribute {name!r}", name=name)
        raise refusal(f"the attribute `{name}` of the class `{kind.__name__}`")

    def _of_class_view(self, view: ClassView, name: str) -> Any:
        """Return an alternative constructor, or a method to be called with an object."""
        if name in view.members:
            return view.members[name]
        if name not in rules_of(view.kind):
            raise refusal(f"`{view.kind.__name__}.{name}`")

        def method(owner: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(owner, view.kind):
                raise TypeError(f"{name!r} is a method of {view.kind.__name__!r} objects")
            return self.get(owner, name)(*args, **kwargs)

        return method

    def of_super(self, above: Any, name: str) -> Any:
        """Return ``super().name``."""
        owner, start = above.__self__, above.__thisclass__
        bases = (owner if isinstance(owner, type) else type(owner)).__mro__
        for base in bases[bases.index(start) + 1 :]:
            if name in vars(base):
                allowed = base in self.own or name in _OF_SUPER or name in rules_of(base)
                if not allowed or is_hidden(base, name):
                    break
                if name == "__init__" and issubclass(base, torch.nn.Module) and base not in self.own:
                    return functools.partial(self._init_layer, base, above)
                return getattr(above, name)
        raise refusal(f"`super().{name}`")

    def _init_layer(self, base: type[torch.nn.Module], above: Any, *args: Any, **kwargs: Any) -> None:
        """Do what a layer's ``__init__`` does, if its weights are not too large."""
        if base is not torch.nn.Module:
            charge_layer(self.meter, base, args, kwargs)
        above.__init__(*args, **kwargs)

    def maker(self, kind: type) -> Callable[..., Any]:
        """Return what makes objects of a class of the code's own: itself, unless it is a layer of torch's."""
        base = made_by_torch(kind) if issubclass(kind, torch.nn.Module) else None
        if base is None:
            return kind

        def make(*args: Any, **kwargs: Any) -> Any:
            charge_layer(self.meter, base, args, kwargs)
            return kind(*args, **kwargs)

        return make

    def guarded_getattr(self, owner: Any, name: Any, *default: Any) -> Any:
        """Do what ``getattr`` does."""
        if type(name) is not str:
            raise TypeError("attribute name must be string")
        if not default:
            return self.get(owner, name)
        try:
            return self.get(owner, name)
        except (AttributeError, ValueError):
            return default[0]

    def guarded_hasattr(self, owner: Any, name: Any) -> bool:
        """Do what ``hasattr`` does; what is not for code is not there."""
        return self.guarded_getattr(owner, name, NOTHING) is not NOTHING

    def names_of(self, value: Any) -> list[str]:
        """Do what ``dir`` does."""
        kind = type(value)
        if kind in self.own:
            return [name for name in dir(value) if not name.startswith("_")]
        return sorted(name for name in rules_of(kind) if is_bindable(name))

    def settable(self, owner: Any, name: str) -> Any:
        """Return the owner if its attribute may be assigned or deleted."""
        kind = type(owner)
        is_own = kind in self.own or (isinstance(owner, type) and owner in self.own)
        if is_own and is_bindable(name):
            check_settable(owner, name)
            return owner
        if any(
            name in names and issubclass(kind, base)
            for base, names in SETTABLE.items()
            if base is torch.Tensor
        ):
            return owner
        if is_point(owner, kind, name, self._engine):
            raise refusal(f"assigning `{name}` together with other targets", "assign it by itself")
        raise refusal(f"assigning the attribute `{name}` of a `{kind.__name__}`")

    def deletable(self, owner: Any, name: str) -> Any:
        """Return the owner if its attribute may be deleted: of the code's own objects."""
        if type(owner) in self.own and is_bindable(name):
            check_settable(owner, name)
            return owner
        raise refusal(f"deleting the attribute `{name}` of a `{type(owner).__name__}`")

    def store(self, value: Any, owner: Any, name: str) -> None:
        """Assign an attribute."""
        kind = type(owner)
        if is_point(owner, kind, name, self._engine):
            setattr(owner, name, given(value, self.own))
        elif name == "requires_grad":
            set_requires_grad(value, self.settable(owner, name))
        else:
            setattr(self.settable(owner, name), name, value)

    def guarded_setattr(self, owner: Any, name: Any, value: Any) -> None:
        """Do what ``setattr`` does."""
        if type(name) is not str:
            raise TypeError("attribute name must be string")
        self.store(value, owner, name)

    # Classes and saving.

    def base(self, base: Any) -> Any:
        """Return the class that a class may derive from.

        Raises:
            SandboxError: None may.
        """
        if isinstance(base, Base):
            return base.base
        if isinstance(base, ClassView) and base.is_base:
            return base.kind
        if isinstance(base, type) and (base in self.own or issubclass(base, Exception)):
            return base
        raise refusal(
            f"deriving a class from {base!r:.100}", "derive from your own, from `Exception`, or layers"
        )

    def defined(self, kind: Any) -> Any:
        """Take note of a class of the code's own."""
        if not isinstance(kind, type):
            raise TypeError("a class statement made no class")
        check_defined(kind)
        self.own.add(kind)
        self._rules.pop(kind, None)
        return kind

    def viewed(self, kind: type, make: Callable[..., Any], *, is_base: bool = False) -> ClassView:
        """Return what stands for a class of this process, the same for ``type`` of its objects."""
        view = self.classes[kind] = ClassView(kind, make, is_base=is_base)
        return view

    def leaving(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return an ``__exit__`` that does not keep what ends the code, and sees no traceback."""

        def exit_(owner: Any, kind: Any = None, error: Any = None, _traceback: Any = None) -> Any:
            if kind is not None and not issubclass(kind, Exception):
                function(owner, None, None, None)
                return False
            return function(owner, kind, error, None)

        return exit_

    def kind_of(self, value: Any, *more: Any) -> Any:
        """Do what ``type(value)`` does."""
        if more:
            raise refusal("`type` with three arguments", "write a `class` statement")
        kind = type(value)
        if kind in self.own or kind in CLASSES or issubclass(kind, Exception | np.number | np.bool_):
            return kind
        return self.classes.get(kind) or KindView(kind)

    def save(self, value: Any) -> Any:
        """Keep a value beyond the trace."""
        num_bytes = size_of(value)
        if type(value) in {list, tuple, dict}:
            items = value.values() if type(value) is dict else value
            num_bytes += sum(map(size_of, items))
        self.meter.charge_saved(num_bytes)
        return save(value)
