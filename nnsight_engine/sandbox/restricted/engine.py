"""What code may have of the model's side: modules by their names, values at points, and plain numbers.

An envoy looks a name up on its module, and a module has weights, functions and everything that torch keeps in
it. Values that the code gives back may be tensors and numbers alone: the model would call the methods of any
other object, and hand its weights over.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

import numpy as np
import torch

from nnsight_engine.envoys.architectures.named_points import NamedPoints, PartList, PointGroup
from nnsight_engine.envoys.architectures.part_envoys import point
from nnsight_engine.envoys.cache import CacheView
from nnsight_engine.envoys.envoy import Envoy
from nnsight_engine.envoys.eproperty import eproperty
from nnsight_engine.sandbox.restricted.budget import refusal
from nnsight_engine.sandbox.restricted.names import is_bindable, names_in
from nnsight_engine.sandbox.restricted.tokenizers import copied

NOTHING: Final = object()
"""There is no such attribute of the model's side."""
_SIMPLE: Final = (
    int, float, complex, str, type(None), torch.dtype, torch.device, torch.Size, Envoy, PointGroup,
    NamedPoints, PartList,
)  # fmt: skip
_PLAIN: Final = (int, float, str, type(None), torch.dtype)
_CONFIGS: Final = frozenset({"PretrainedConfig", "PreTrainedConfig"})
_TOKENIZERS: Final = frozenset({"PreTrainedTokenizerBase"})
_TOKENIZER: Final = names_in(
    """
    vocab_size all_special_ids all_special_tokens bos_token bos_token_id eos_token
    eos_token_id pad_token pad_token_id unk_token unk_token_id mask_token mask_token_id padding_side
    model_max_length
    """
)
TOKENIZERS_CALLS: Final = names_in(
    """
    encode decode batch_decode convert_ids_to_tokens convert_tokens_to_ids convert_tokens_to_string
    tokenize get_vocab
    """
)
_OUTPUTS: Final = frozenset({"ModelOutput", "BatchEncoding"})
_NUMBERS: Final = "biufc"
"""Kinds of numpy's arrays that hold no objects."""
_DATA: Final = frozenset(
    {int, float, bool, complex, str, bytes, type(None), torch.Size, slice, range, torch.dtype, torch.device}
)


def of_engine(owner: Any, kind: type, name: str) -> Any:  # noqa: PLR0911 - one for each kind of object
    """Return what the model's side lets be had: modules by their names, values at points, numbers."""
    if not is_bindable(name):
        return NOTHING
    if issubclass(kind, Envoy):
        return _of_envoy(owner, kind, name)
    if issubclass(kind, PointGroup):
        if any(name in vars(base) for base in kind.__mro__) or name.startswith("_"):
            return NOTHING
        value = getattr(owner, name)
        has = getattr(owner, "_has", None)
        if isinstance(value, torch.Tensor) and (type(owner) is PointGroup or (has is not None and has(name))):
            return value
        return _simple(value, name)
    if issubclass(kind, CacheView) and not name.startswith("_"):
        return getattr(owner, name)
    return _of_transformers(owner, kind, name)


def _of_envoy(owner: Any, kind: type, name: str) -> Any:  # noqa: PLR0911 - one for each kind of name
    if name.startswith("_"):
        return NOTHING
    if name in owner._names:  # noqa: SLF001 - an envoy's children
        return owner.__dict__[name]
    for base in kind.__mro__:
        if name in vars(base):
            if isinstance(vars(base)[name], eproperty | point):
                return taken(getattr(owner, name))
            if name == "tokenizer":
                return owner.tokenizer
            return NOTHING
    if name in owner.__dict__:
        return _simple(owner.__dict__[name], name)
    return _simple(getattr(owner, name), name)


def _simple(value: Any, name: str) -> Any:
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


def _of_transformers(owner: Any, kind: type, name: str) -> Any:  # noqa: PLR0911 - the same
    if name.startswith("_") or not any(base.__module__.startswith("transformers.") for base in kind.__mro__):
        return NOTHING
    if _is_of_transformers(kind, _CONFIGS):
        value = getattr(owner, name)
        if isinstance(value, _PLAIN) or _is_of_transformers(type(value), _CONFIGS):
            return value
        if type(value) in {list, tuple} and all(isinstance(one, _PLAIN) for one in value):
            return type(value)(value)
        if type(value) is dict and all(isinstance(one, _PLAIN) for one in value.values()):
            return dict(value)
    elif _is_of_transformers(kind, _TOKENIZERS) and name in _TOKENIZER:
        return copied(getattr(owner, name))
    elif _is_of_transformers(kind, _OUTPUTS) and (
        name in owner or name in {"keys", "values", "items", "to_tuple"}
    ):
        return getattr(owner, name)
    return NOTHING


def is_point(owner: Any, kind: type, name: str, engine: Mapping[type, Collection[str]]) -> bool:
    """Tell whether an attribute is a value of the model's, which may be replaced."""
    if not is_bindable(name) or name.startswith("_"):
        return False
    if any(issubclass(kind, base) for base in engine):
        return any(name in names and issubclass(kind, base) for base, names in engine.items())
    if issubclass(kind, Envoy):
        found = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)
        return isinstance(found, eproperty | point) or (found is None and name == "logits")
    if issubclass(kind, PointGroup):
        has = getattr(owner, "_has", None)
        if has is None or has(name):
            return True
        raw = owner.__dict__["_raw"]
        return is_point(raw, type(raw), name, engine)
    return False


def given(value: Any, own: Collection[type], depth: int = 8) -> Any:
    """Return what the code gives to the model, in containers that the code does not hold.

    Raises:
        SandboxError: There is an object of the code's own in it, or one that may hold such: the model would
            call its methods.
    """
    kind = type(value)
    if kind in _DATA or isinstance(value, torch.Tensor | Envoy | PointGroup):
        return value
    if kind in {list, tuple} and depth:
        return kind(given(one, own, depth - 1) for one in value)
    if kind is dict and depth:
        return {given(key, own): given(one, own, depth - 1) for key, one in value.items()}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in _NUMBERS:
        return value
    if kind not in own and kind.__module__.partition(".")[0] in {"torch", "transformers"} and depth:
        if isinstance(value, Mapping):
            given(list(value.values()), own, depth - 1)
            return value
        if isinstance(value, tuple):  # with names
            given(tuple(value), own, depth - 1)
            return value
    raise refusal(f"giving the model a `{kind.__name__}`", "give it tensors and numbers")


def taken(value: Any, depth: int = 4) -> Any:
    """Return a value of the model's with containers of the code's own: the model goes on with its own."""
    kind = type(value)
    if kind in {list, tuple} and depth:
        return kind(taken(one, depth - 1) for one in value)
    if kind is dict and depth:
        return {key: taken(one, depth - 1) for key, one in value.items()}
    return value


def _is_of_transformers(kind: type, names: frozenset[str]) -> bool:
    return any(
        base.__name__ in names and base.__module__.startswith("transformers.") for base in kind.__mro__
    )


def is_tokenizer(kind: type) -> bool:
    """Tell whether objects of a type are tokenizers."""
    return _is_of_transformers(kind, _TOKENIZERS)
