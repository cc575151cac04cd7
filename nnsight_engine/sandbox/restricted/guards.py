"""What changed code calls: attributes, items, operators and calls, each asked for and measured here.

One ``Guards`` serves the code of one message. It knows that code's own classes and modules, whose attributes
are all for it; for anything else ``tables`` says what may be had. It gives out no object that leads further.
"""

from __future__ import annotations

import collections
import functools
import operator
import string
import types
from _string import formatter_field_name_split
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final

import numpy as np
import torch

from nnsight_engine.core.saves import save
from nnsight_engine.envoys.architectures.named_points import NamedPoints, PointGroup
from nnsight_engine.envoys.architectures.part_envoys import point
from nnsight_engine.envoys.cache import CacheView
from nnsight_engine.envoys.envoy import Envoy
from nnsight_engine.envoys.eproperty import eproperty
from nnsight_engine.sandbox.restricted.budget import Budget, Meter, refusal
from nnsight_engine.sandbox.restricted.names import is_bindable
from nnsight_engine.sandbox.restricted.sizes import Sizer, check_format, charge_result, size_of
from nnsight_engine.sandbox.restricted.tables import PLAIN, SETTABLE, Rules, rules_of
from nnsight_engine.sandbox.restricted.views import Base, ClassView, KindView, Lazy, ModuleView

_BINARY: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "//": operator.floordiv,
    "%": operator.mod, "**": operator.pow, "<<": operator.lshift, ">>": operator.rshift, "|": operator.or_,
    "^": operator.xor, "&": operator.and_, "@": operator.matmul,
}  # fmt: skip
_INPLACE: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "+": operator.iadd, "-": operator.isub, "*": operator.imul, "/": operator.itruediv,
    "//": operator.ifloordiv, "%": operator.imod, "**": operator.ipow, "<<": operator.ilshift,
    ">>": operator.irshift, "|": operator.ior, "^": operator.ixor, "&": operator.iand, "@": operator.imatmul,
}  # fmt: skip
_UNARY: Final[Mapping[str, Callable[[Any], Any]]] = {
    "-": operator.neg, "+": operator.pos, "~": operator.invert
}  # fmt: skip
_COMPARE: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
    "in": lambda item, values: item in values, "not in": lambda item, values: item not in values,
}  # fmt: skip
_FREE: Final = frozenset({float, bool, type(None), complex})
"""Types whose operators make nothing large, whatever the other side is but a tensor."""
_SMALL_INT: Final = 2**31
_COPIED: Final = (list, tuple, str, bytes)
_CALLABLE: Final = frozenset(
    {
        types.FunctionType,
        types.MethodType,
        types.MethodWrapperType,
        types.BuiltinFunctionType,
        functools.partial,
        ClassView,
        property,
        staticmethod,
    }
)
_SIMPLE: Final = (
    int, float, complex, str, type(None), torch.dtype, torch.device, torch.Size, Envoy, PointGroup, NamedPoints, types.EllipsisType
)  # fmt: skip
_LARGE_IN_A_CHAIN: Final = 1024
_CONFIGS: Final = frozenset({"PretrainedConfig", "PreTrainedConfig"})
_TOKENIZER: Final = frozenset(
    "encode decode batch_decode convert_ids_to_tokens convert_tokens_to_ids convert_tokens_to_string tokenize get_vocab "
    "vocab_size all_special_ids all_special_tokens bos_token bos_token_id eos_token eos_token_id pad_token pad_token_id "
    "unk_token unk_token_id mask_token mask_token_id padding_side model_max_length".split()
)


class Guards:
    """The guards of one message's code.

    Attributes:
        meter: What is left of its budget.
        sizer: Measures results before they are made.
        step: Counts a step.
        own: The classes that it defined.
        modules: Its modules, by identity.
        classes: Classes of this process that it may call and have as bases, with what stands for each.
    """

    def __init__(self, budget: Budget, engine: Mapping[type, Collection[str]]) -> None:
        """Begin with no code.

        Args:
            budget: What the code may use.
            engine: Further types of objects that the code is given, and what it may have of them.
        """
        self.meter = Meter(budget)
        self.sizer = Sizer(self.meter)
        self.step = self.meter.counter()
        self.own: set[type] = set()
        self.modules: dict[int, types.ModuleType] = {}
        self.classes: dict[type, Any] = {}
        self._engine = engine
        self._rules: dict[type, Rules] = {}
        self._formatter = _Formatter(self)

    # Attributes.

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

    def _slowly(self, owner: Any, kind: type, name: str) -> Any:
        if kind is ModuleView:
            return self.of_view(owner, name)
        if kind in self.own:
            return self._of_own(owner, kind, name)
        if issubclass(kind, type):
            return self._of_class(owner, name)
        if name == "save":
            return functools.partial(self.save, owner)
        found = self._of_engine(owner, kind, name)
        if found is not _NOTHING:
            return found
        if kind is types.ModuleType and id(owner) in self.modules and is_bindable(name):
            return getattr(owner, name)
        if kind is ClassView:
            return self._of_class_view(owner, name)
        if issubclass(kind, tuple) and kind.__module__.partition(".")[0] in {"torch", "numpy"} and is_bindable(name):
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
        if not is_bindable(name):
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
        if kind in self.own and is_bindable(name):
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

    def _of_engine(self, owner: Any, kind: type, name: str) -> Any:
        """Return what the model's side lets be had: modules by their names, values at points, numbers."""
        if not is_bindable(name):
            return _NOTHING
        if issubclass(kind, Envoy):
            return self._of_envoy(owner, kind, name)
        if issubclass(kind, PointGroup):
            if any(name in vars(base) for base in kind.__mro__) or name.startswith("_"):
                return _NOTHING
            value = getattr(owner, name)
            has = getattr(owner, "_has", None)
            if isinstance(value, torch.Tensor) and (
                type(owner) is PointGroup or (has is not None and has(name))
            ):
                return value
            return self._simple(value, name)
        if issubclass(kind, CacheView) and not name.startswith("_"):
            return getattr(owner, name)
        return self._of_transformers(owner, kind, name)

    def _of_envoy(self, owner: Any, kind: type, name: str) -> Any:
        if name.startswith("_"):
            return _NOTHING
        if name in owner._names:  # noqa: SLF001 - an envoy's children
            return owner.__dict__[name]
        for base in kind.__mro__:
            if name in vars(base):
                if isinstance(vars(base)[name], eproperty | point):
                    return getattr(owner, name)
                if name == "tokenizer":
                    return owner.tokenizer
                return _NOTHING
        if name in owner.__dict__:
            return self._simple(owner.__dict__[name], name)
        return self._simple(getattr(owner, name), name)

    def _simple(self, value: Any, name: str) -> Any:
        """Return what an envoy looked up on its module if it is harmless: no weights, no functions."""
        kind = type(value)
        if isinstance(value, torch.Tensor):
            raise refusal(f"the weight `{name}`", "weights stay where they are; call the module")
        if (
            isinstance(value, _SIMPLE)
            or _is_of_transformers(kind, _CONFIGS)
            or _is_of_transformers(kind, _TOKENIZERS)
        ):
            return value
        if kind in {list, tuple} and all(isinstance(one, _SIMPLE) for one in value):
            return kind(value)
        raise refusal(f"`{name}`, a `{kind.__name__}` of the model,")

    def _of_transformers(self, owner: Any, kind: type, name: str) -> Any:
        if name.startswith("_") or not any(
            base.__module__.startswith("transformers.") for base in kind.__mro__
        ):
            return _NOTHING
        if _is_of_transformers(kind, _CONFIGS):
            value = getattr(owner, name)
            if isinstance(value, int | float | str | type(None) | torch.dtype) or _is_of_transformers(
                type(value), _CONFIGS
            ):
                return value
            if type(value) in {list, tuple, dict}:
                return type(value)(value)
        elif _is_of_transformers(kind, _TOKENIZERS) and name in _TOKENIZER:
            return getattr(owner, name)
        elif _is_of_transformers(kind, _OUTPUTS) and (
            name in owner or name in {"keys", "values", "items", "to_tuple"}
        ):
            return getattr(owner, name)
        return _NOTHING

    def of_super(self, above: Any, name: str) -> Any:
        """Return ``super().name``."""
        owner, start = above.__self__, above.__thisclass__
        bases = (owner if isinstance(owner, type) else type(owner)).__mro__
        for base in bases[bases.index(start) + 1 :]:
            if name in vars(base):
                allowed = base in self.own or name in _OF_SUPER or name in rules_of(base)
                if not allowed:
                    break
                return getattr(above, name)
        raise refusal(f"`super().{name}`")

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
        return self.guarded_getattr(owner, name, _NOTHING) is not _NOTHING

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
            return owner
        if any(
            name in names and issubclass(kind, base)
            for base, names in SETTABLE.items()
            if base is torch.Tensor
        ):
            return owner
        if self._is_point(owner, kind, name):
            raise refusal(f"assigning `{name}` together with other targets", "assign it by itself")
        raise refusal(f"assigning the attribute `{name}` of a `{kind.__name__}`")

    def deletable(self, owner: Any, name: str) -> Any:
        """Return the owner if its attribute may be deleted: of the code's own objects."""
        if type(owner) in self.own and is_bindable(name):
            return owner
        raise refusal(f"deleting the attribute `{name}` of a `{type(owner).__name__}`")

    def store(self, value: Any, owner: Any, name: str) -> None:
        """Assign an attribute."""
        kind = type(owner)
        if self._is_point(owner, kind, name):
            self.check_data(value)
            setattr(owner, name, value)
        else:
            setattr(self.settable(owner, name), name, value)

    def guarded_setattr(self, owner: Any, name: Any, value: Any) -> None:
        """Do what ``setattr`` does."""
        if type(name) is not str:
            raise TypeError("attribute name must be string")
        self.store(value, owner, name)

    def _is_point(self, owner: Any, kind: type, name: str) -> bool:
        """Tell whether an attribute is a value of the model's, which may be replaced."""
        if not is_bindable(name) or name.startswith("_"):
            return False
        if any(issubclass(kind, base) for base in self._engine):
            return any(name in names and issubclass(kind, base) for base, names in self._engine.items())
        if issubclass(kind, Envoy):
            found = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)
            return isinstance(found, eproperty | point) or (found is None and name == "logits")
        if issubclass(kind, PointGroup):
            has = getattr(owner, "_has", None)
            if has is None or has(name):
                return True
            raw = owner.__dict__["_raw"]
            return self._is_point(raw, type(raw), name)
        return False

    def check_data(self, value: Any, depth: int = 8) -> None:
        """Refuse to give the model an object of the code's own: the model would call its methods."""
        kind = type(value)
        if kind in {list, tuple, dict} and depth:
            for one in value.values() if kind is dict else value:
                self.check_data(one, depth - 1)
        elif kind in self.own or (
            kind not in _DATA and not isinstance(value, torch.Tensor | np.ndarray | Envoy)
        ):
            module = kind.__module__.partition(".")[0]
            if kind in self.own or module not in {"torch", "transformers", "numpy"} or callable(value):
                raise refusal(f"giving the model a `{kind.__name__}`", "give it tensors and numbers")

    # Items, operators, calls.

    def item(self, owner: Any, key: Any) -> Any:
        """Return an item."""
        kind = type(owner)
        if kind is dict:
            return owner[key]
        if isinstance(owner, torch.Tensor):
            if type(key) is int or type(key) is slice or (type(key) is tuple and not any(map(_is_many, key))):
                return owner[key]
            return self.sizer.call("index", operator.getitem, (owner, key), {})
        if kind in _COPIED:
            return charge_result(self.meter, owner[key]) if type(key) is slice else owner[key]
        if isinstance(owner, np.ndarray):
            return charge_result(self.meter, owner[key])
        if issubclass(kind, Envoy) and isinstance(key, str):
            return self.get(owner, key)
        if (
            issubclass(kind, CacheView)
            and isinstance(key, str)
            and any(one.startswith("_") for one in key.split("."))
        ):
            raise KeyError(key)
        return owner[key]

    def store_item(self, value: Any, owner: Any, key: Any) -> None:
        """Assign an item."""
        if type(owner) is list and type(key) is slice:
            value = self.spread(value)
        if isinstance(owner, NamedPoints):
            self.check_data(value)
        owner[key] = value

    def one(self, key: Any) -> Any:
        """Return the key of an item that is assigned together with others."""
        if type(key) is slice and not (key.start is None and key.stop is None and key.step is None):
            raise refusal("a slice among several things that are assigned", "assign it by itself")
        return key

    def binary(self, sign: str, left: Any, right: Any) -> Any:
        """Return ``left + right``, and so on."""
        self._check_operands(sign, left, right)
        return _BINARY[sign](left, right)

    def inplace(self, sign: str, left: Any, right: Any) -> Any:
        """Return what ``left += right`` binds."""
        self._check_operands(sign, left, right)
        if isinstance(left, list) and sign == "+":
            right = self.spread(right)
        return _INPLACE[sign](left, right)

    def _check_operands(self, sign: str, left: Any, right: Any) -> None:
        left_kind, right_kind = type(left), type(right)
        if left_kind in _FREE and right_kind in _FREE:
            return
        if left_kind is int and right_kind is int and sign not in {"**", "<<"}:
            if -_SMALL_INT < left < _SMALL_INT or sign != "*":
                if -_SMALL_INT < right < _SMALL_INT or sign != "*":
                    return
        self.sizer.operands(sign, left, right)

    def unary(self, sign: str, value: Any) -> Any:
        """Return ``-value``, and so on."""
        if isinstance(value, torch.Tensor | np.ndarray):
            self.meter.charge(size_of(value))
        return _UNARY[sign](value)

    def compare(self, sign: str, left: Any, right: Any) -> Any:
        """Return ``left < right``, and so on."""
        if isinstance(left, torch.Tensor | np.ndarray) or isinstance(right, torch.Tensor | np.ndarray):
            many = (torch.Tensor, np.ndarray)
            if isinstance(left, (*many, int, float)) and isinstance(right, (*many, int, float)):
                self.sizer.operands("+", left, right)
        elif sign in {"in", "not in"} and isinstance(right, _COPIED):
            self.meter.take_steps(len(right) // 64)
        elif sign in {"in", "not in"} and isinstance(right, range) and type(left) is not int:
            self.meter.take_steps(len(right))
        return _COMPARE[sign](left, right)

    def small(self, value: Any) -> Any:
        """Return an operand of a chain of comparisons."""
        if isinstance(value, torch.Tensor | np.ndarray) and size_of(value) > _LARGE_IN_A_CHAIN * 8:
            raise refusal("a chain of comparisons of large tensors", "compare twice, and use `&`")
        return value

    def begin_attribute(self, owner: Any, name: str) -> tuple[Any, Any, Any, bool]:
        """Read what ``owner.name += …`` changes."""
        return owner, name, self.get(owner, name), True

    def begin_item(self, owner: Any, key: Any) -> tuple[Any, Any, Any, bool]:
        """Read what ``owner[key] += …`` changes."""
        return owner, key, self.item(owner, key), False

    def finish(self, sign: str, begun: tuple[Any, Any, Any, bool], right: Any) -> None:
        """Compute it, and store it."""
        owner, key, value, is_attribute = begun
        new = self.inplace(sign, value, right)
        if is_attribute:
            self.store(new, owner, key)
        else:
            self.store_item(new, owner, key)

    def callee(self, function: Any) -> Any:
        """Return what is to be called for it.

        Raises:
            SandboxError: It is nothing for code to call.
        """
        kind = type(function)
        if kind in _CALLABLE or kind in self.own or kind.__module__.startswith(_OURS):
            return function
        if issubclass(kind, Envoy | PointGroup):
            return functools.partial(self._applied, function)
        if issubclass(kind, type):
            if function in self.own or issubclass(function, Exception | np.generic) or function in _CLASSES:
                return function
        elif kind.__module__ in _HELPERS or not callable(function) or issubclass(kind, torch.nn.Module):
            return function
        elif _is_of_transformers(kind, _TOKENIZERS) or any(issubclass(kind, base) for base in self._engine):
            return function
        elif kind.__module__.startswith("nnsight_engine.interleaving.barrier"):
            return function
        raise refusal(f"calling a `{kind.__name__}`")

    def _applied(self, envoy: Any, *args: Any, **kwargs: Any) -> Any:
        """Apply a module of the model to tensors and numbers."""
        self.check_data(args)
        self.check_data(kwargs)
        return charge_result(self.meter, envoy(*args, **kwargs))

    # Strings and containers.

    def counted(self, value: Any) -> Any:
        """Count a result's bytes, and return it."""
        return charge_result(self.meter, value)

    def formatted(self, value: Any, conversion: int, spec: str) -> str:
        """Return a part of an f-string."""
        if conversion == ord("r"):
            value = repr(value)
        elif conversion == ord("s"):
            value = str(value)
        elif conversion == ord("a"):
            value = ascii(value)
        if spec:
            check_format(spec)
        return str(self.counted(format(value, spec)))

    def joined(self, parts: tuple[str, ...]) -> str:
        """Put an f-string together."""
        self.meter.charge(sum(map(len, parts)))
        return "".join(parts)

    def formatted_text(self, text: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """Return ``text.format(...)``, whose fields are asked for like any others."""
        check_format(text)
        self.meter.charge(len(text) + 64 * text.count("{"))
        return str(self.counted(self._formatter.vformat(text, args, kwargs)))

    def spread(self, values: Any) -> Any:
        """Return the items of ``*values``, counted."""
        if isinstance(values, list | tuple | dict | set | frozenset | str | bytes | range):
            self.meter.take_steps(len(values) // 64)
            self.meter.charge(len(values) * 8)
            return values
        return self.counted(tuple(values))

    def spread_keys(self, values: Any) -> Any:
        """Return ``**values``, counted."""
        if isinstance(values, Mapping):
            self.meter.take_steps(len(values) // 64)
            self.meter.charge(len(values) * 64)
        return values

    def listed(self, values: Iterable[Any]) -> list[Any]:
        """Return a list of items, counted."""
        return list(self.spread(values))

    def lazily(self, values: Iterable[Any]) -> Lazy:
        """Return an iterator that counts its steps."""
        return Lazy(values, self.step)

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
        self.own.add(kind)
        self._rules.pop(kind, None)
        return kind

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
        if kind in self.own or kind in _CLASSES or issubclass(kind, Exception | np.generic):
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


def _is_many(part: Any) -> bool:
    """Tell whether a part of an index picks many items by their numbers."""
    return not (type(part) in {int, slice} or part is None or part is ...)


def _is_of_transformers(kind: type, names: frozenset[str]) -> bool:
    return any(
        base.__name__ in names and base.__module__.startswith("transformers.") for base in kind.__mro__
    )


_NAMED_PART: Final = type(vars(collections.namedtuple("_NamedPart", "part"))["part"])  # noqa: PYI024 - its type is wanted
_NOTHING: Final = object()
_TOKENIZERS: Final = frozenset({"PreTrainedTokenizerBase"})
_OUTPUTS: Final = frozenset({"ModelOutput", "BatchEncoding"})
_OF_SUPER: Final = frozenset({"__init__", "__repr__", "__str__", "__eq__", "__hash__", "__post_init__"})
_DATA: Final = frozenset(
    {int, float, bool, complex, str, bytes, type(None), torch.Size, slice, range, torch.dtype, torch.device}
)
_CLASSES: Final = frozenset({int, float, bool, complex, slice, np.dtype})
"""Classes of Python that code has as they are."""
_OURS: Final = "nnsight_engine.sandbox.restricted"
_HELPERS: Final = frozenset(
    {"functools", "operator", "contextlib", "typing", "torch.autograd.grad_mode", "torch.amp.autocast_mode"}
)


class _Formatter(string.Formatter):
    """``str.format`` whose fields go through the guards."""

    def __init__(self, guards: Guards) -> None:
        self._guards = guards

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        """Return what a field names."""
        first, rest = formatter_field_name_split(field_name)
        found = self.get_value(first, args, kwargs)
        for is_attribute, key in rest:
            found = self._guards.get(found, key) if is_attribute else self._guards.item(found, key)
        return found, first

    def format_field(self, value: Any, format_spec: str) -> str:
        """Format a value, not too wide."""
        check_format(format_spec)
        return str(format(value, format_spec))


__all__ = ["Guards"]
