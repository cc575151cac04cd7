"""The policy that reads code restricted: what names in a message mean, and what it may make of objects."""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

import torch

from nnsight_engine.sandbox.restricted import names
from nnsight_engine.sandbox.restricted.budget import Budget, Stop, refusal
from nnsight_engine.sandbox.restricted.builtin_names import builtins_for
from nnsight_engine.sandbox.restricted.guards import Guards
from nnsight_engine.sandbox.restricted.layers import check_layer_state
from nnsight_engine.sandbox.restricted.modules import Modules
from nnsight_engine.sandbox.restricted.rewriting import restrict
from nnsight_engine.sandbox.restricted.views import ClassView, real
from nnsight_engine.serialization.errors import SandboxError
from nnsight_engine.serialization.limits import Policy
from nnsight_engine.serialization.rules import Rules

_NO_ENGINE: Final[Mapping[type, Collection[str]]] = types.MappingProxyType({})
_MADE: Final = (
    collections.Counter, collections.OrderedDict, collections.defaultdict, collections.deque,
    functools.partial,
)  # fmt: skip


def restricted_policy(budget: Budget, engine: Mapping[type, Collection[str]] = _NO_ENGINE) -> Policy:
    """Return the policy for one message from somebody who is not trusted; another message takes another one.

    Args:
        budget: What its code may use, reading the message included.
        engine: Types of objects that ``resolve`` gives, and that this package does not know, with the
            attributes that code may read and assign.
    """
    rules = RestrictedRules(budget, engine)
    return Policy(lambda _module, _name: True, allow_source=True, rules=rules)


class RestrictedRules(Rules):
    """Rules for one message.

    Attributes:
        guards: What its code goes through; ``guards.meter`` says what is left of the budget.
    """

    rewrite = staticmethod(restrict)
    keeps_real_names = False
    stops = (Stop,)

    def __init__(self, budget: Budget, engine: Mapping[type, Collection[str]]) -> None:
        """Begin with a whole budget."""
        self.guards = Guards(budget, engine)
        self._builtins = builtins_for(self.guards)
        self._modules = Modules(self.guards, self._builtins)
        self._builtins[names.IMPORT] = self._modules.imported

    def find(self, module: str, name: str) -> Any:
        """Return what a name means, see ``Rules``; views where the thing itself would lead further."""
        return self._modules.find(module, name)

    def namespace(self, name: str, file: str | None, *, is_real: bool) -> types.ModuleType:
        """Return a module with these builtins and nothing else in it."""
        if is_real:
            raise SandboxError(
                f"code of the installed module {name} does not run in the sandbox; write it in the block, or "
                "send it as source with register_by_value (see docs/sandbox-language.md)"
            )
        module = types.ModuleType(str(name))
        vars(module).update({"__builtins__": self._builtins, "__file__": file if type(file) is str else None})
        self.guards.modules[id(module)] = module
        return module

    def check_names(self, names_: Iterable[Any], *, of_cells: bool = False) -> None:
        """Refuse names of Python's own, those of the guards among them."""
        for name in names_:
            if not names.is_bindable(name) and not (of_cells and name == "__class__"):
                raise SandboxError(
                    f"the name {name!r} is not for code in the sandbox (see docs/sandbox-language.md)"
                )

    def real(self, value: Any) -> Any:
        """Return the class that a view stands for, if objects of it may be made from a message."""
        if isinstance(value, ClassView):
            return real(value)
        return value

    def new(self, kind: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return an object of the code's own class, of a layer, an error, or a container."""
        if kind is functools.partial and args:
            args = (self.guards.callee(args[0]), *args[1:])
        if kind in self.guards.own or kind in _MADE or _is_data(kind):
            return kind.__new__(kind, *args, **kwargs)
        raise refusal(f"an object of the class `{kind.__name__}` among a block's variables")

    def member(self, owner: Any, name: str) -> Any:
        """Return an attribute, as code gets it."""
        if type(name) is not str:
            raise SandboxError("an attribute's name is no string")
        return self.guards.get(owner, name)

    def callee(self, function: Any) -> Any:
        """Return what is called, which is what code could call."""
        return self.guards.callee(function)

    def check_class(self, kind: type) -> None:
        """Refuse a class that was there before, which a decorator can give."""
        if kind not in self.guards.own:
            raise refusal(f"source of a class that makes `{kind.__name__}`")

    def check_items(self, value: Any) -> None:
        """Refuse to add items to anything but containers, and objects of the code's own classes."""
        if type(value) not in self.guards.own and type(value) not in _MADE:
            raise refusal(f"adding items to a `{type(value).__name__}`")

    def check_state(self, value: Any, state: Any) -> None:
        """Refuse to set attributes of anything but the code's own objects, layers and errors."""
        kind = type(value)
        if kind is functools.partial:
            if type(state) is not tuple or not state or self.guards.callee(state[0]) is not state[0]:
                raise refusal("a `functools.partial` of this")
            return
        if isinstance(value, torch.nn.Module):
            check_layer_state(state)
        if kind not in self.guards.own and not isinstance(
            value, (torch.nn.Module, Exception, functools.partial)
        ):
            raise refusal(f"setting attributes of a `{kind.__name__}`")

    def told(self) -> Exception:
        """Return the error that tells of the stop that is being handled."""
        return self.guards.meter.told()

    def check_method(self, function: Any) -> None:
        """Refuse to bind anything but functions."""
        if not isinstance(function, types.FunctionType):
            raise refusal(f"a method that is a `{type(function).__name__}`")


def _is_data(kind: type) -> bool:
    """Tell whether objects of a class are data to whoever has them: layers and errors."""
    return issubclass(kind, torch.nn.Module | Exception)


__all__ = ["RestrictedRules", "restricted_policy"]
