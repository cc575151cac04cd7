"""Which attributes of which types code may have; what is not here, it may not.

An attribute is either as it is (``PLAIN``) or goes through a function that is called with the guards, the
object and the name: to measure what a method makes, or to give something harmless of the same name. Types
have what their bases have too.
"""

from __future__ import annotations

import collections
import enum
import types
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch

from nnsight_engine.envoys.architectures.named_points import NamedPoints, PointGroup
from nnsight_engine.envoys.cache import CacheView, Entry
from nnsight_engine.envoys.envoy import Envoy
from nnsight_engine.envoys.tracers.interleaving import InterleavingTracer
from nnsight_engine.envoys.tree import at_path
from nnsight_engine.sandbox.restricted.arguments import dense
from nnsight_engine.sandbox.restricted.budget import refusal
from nnsight_engine.sandbox.restricted.codecs import check_codec
from nnsight_engine.sandbox.restricted.engine import given, taken
from nnsight_engine.sandbox.restricted.views import ClassView, KindView

Rule = Callable[[Any, Any, str], Any]
PLAIN: Final = object()
Rules = dict[str, Any]


def _plain(names: str) -> Rules:
    return dict.fromkeys(names.split(), PLAIN)


def _each(rule: Rule, names: str) -> Rules:
    return dict.fromkeys(names.split(), rule)


def _measured(guards: Any, owner: Any, name: str) -> Any:
    """Return a method whose result is measured before it is made, where that can be told, and counted."""
    return _Call(guards, owner, name)


class _Call:
    """A method that is measured when it is called."""

    __slots__ = ("_guards", "_name", "_owner")

    def __init__(self, guards: Any, owner: Any, name: str) -> None:
        self._guards = guards
        self._owner = owner
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._guards.sizer.method(self._owner, self._name, args, kwargs)

    def __repr__(self) -> str:
        return f"<method {self._name!r} of {type(self._owner).__name__!r}>"


def _counted(guards: Any, owner: Any, name: str) -> Any:
    """Return a method of a string or a container whose result is counted."""
    method = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        return guards.counted(method(*args, **kwargs))

    return call


def _wide(guards: Any, owner: Any, name: str) -> Any:
    """Return a method of a string that takes a width."""
    method = getattr(owner, name)

    def call(*args: Any) -> Any:
        guards.meter.charge(sum(one for one in args if isinstance(one, int) and one > 0) * max(len(owner), 1))
        return method(*args)

    return call


def _joining(guards: Any, owner: Any, _name: str) -> Any:
    def join(values: Any) -> Any:
        every = guards.listed(values)
        guards.meter.charge(
            sum(len(one) for one in every if isinstance(one, str | bytes)) + len(owner) * len(every)
        )
        return owner.join(every)

    return join


def _replacing(guards: Any, owner: Any, _name: str) -> Any:
    def replace(old: Any, new: Any, count: int = -1) -> Any:
        guards.meter.charge(len(owner) + (owner.count(old) if len(old) else len(owner) + 1) * len(new))
        return owner.replace(old, new, count)

    return replace


def _formatting(guards: Any, owner: Any, _name: str) -> Any:
    def format_(*args: Any, **kwargs: Any) -> Any:
        return guards.formatted_text(owner, args, kwargs)

    return format_


def _coding(guards: Any, owner: Any, name: str) -> Any:
    """Return a method that turns text into bytes, or back."""
    method = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        check_codec(*args, **kwargs)
        return guards.counted(method(*args, **kwargs))

    return call


def _dense(_guards: Any, owner: Any, name: str) -> Any:
    """Return a tensor's gradient, unless it is sparse."""
    found = getattr(owner, name)
    return dense(found) if isinstance(found, torch.Tensor) else found


def _extending(guards: Any, owner: Any, name: str) -> Any:
    """Return a method that takes all of other containers."""
    method = getattr(owner, name)

    def call(*others: Any, **kwargs: Any) -> Any:
        return method(*[guards.spread(other) for other in others], **guards.spread_keys(kwargs))

    return call


def _of_list(guards: Any, owner: Any, name: str) -> Any:
    """Return a method that goes through the whole list."""
    method = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        guards.meter.take_steps(1 + len(owner) // 64)
        return method(*args, **kwargs)

    return call


def _numbers(guards: Any, owner: Any, _name: str) -> Any:
    def tolist() -> Any:
        guards.meter.charge(owner.size * 40 if isinstance(owner, np.ndarray) else owner.numel() * 40)
        return owner.tolist()

    return tolist


def _zeroed(guards: Any, owner: Any, name: str) -> Any:
    """Return what makes zeros where torch leaves memory as it finds it: it may hold another's numbers."""
    other = {"new_empty": "new_zeros"}[name]
    return _Call(guards, owner, other)


def _get(guards: Any, owner: Any, _name: str) -> Any:
    """Return ``envoy.get(path)`` that asks the guards at each part of the path."""

    def get(path: str) -> Any:
        return at_path(owner, str(path), guards.get, guards.item)

    return get


def _with_inputs(guards: Any, owner: Any, name: str) -> Any:
    """Return what opens a trace or an invoke, with data for input and nothing that says what runs."""
    method = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        for one in ("fn", "backend", "tracer_cls"):
            if kwargs.get(one) is not None:
                raise refusal(f"the argument `{one}`")
        args, kwargs = given(args, guards.own), given(kwargs, guards.own)
        return method(*args, **kwargs)

    return call


def _value(_guards: Any, owner: Any, name: str) -> Any:
    """Return a value of the model's, in containers that the model does not hold."""
    return taken(getattr(owner, name))


def _skip(guards: Any, owner: Any, _name: str) -> Any:
    def skip(value: Any) -> None:
        owner.skip(given(value, guards.own))

    return skip


def _name_of(_guards: Any, owner: Any, _name: str) -> str:
    return str(owner.__name__)


_NAMED: Final = {"__name__": _name_of}

_TENSOR_PLAIN: Final = _plain(
    """
        H T mT mH adjoint backward chunk conj data detach detach_ device diagonal dim dim_order
        dsplit dtype element_size equal expand expand_as get_device hsplit imag is_complex
        is_conj is_contiguous is_cpu is_cuda is_floating_point is_inference is_leaf is_meta is_neg
        is_nonzero is_quantized is_same_size is_signed is_sparse item itemsize layout moveaxis
        movedim narrow nbytes ndim ndimension nelement numel permute real requires_grad
        requires_grad_ retain_grad retains_grad select shape size split split_with_sizes squeeze
        squeeze_ storage_offset stride swapaxes swapaxes_ swapdims t t_ tensor_split transpose
        transpose_ unbind unflatten unsqueeze unsqueeze_ view view_as vsplit broadcast_to
        resolve_conj resolve_neg sum_to_size
        """
)
_TENSOR_MEASURED: Final = _each(
    _measured,
    """
        abs abs_ absolute absolute_ acos acos_ acosh acosh_ add add_ addbmm addbmm_ addcdiv addcdiv_
        addcmul addcmul_ addmm addmm_ addmv addmv_ addr addr_ all allclose amax amin aminmax angle
        any arccos arccos_ arccosh arccosh_ arcsin arcsin_ arcsinh arcsinh_ arctan arctan2 arctan2_
        arctan_ arctanh arctanh_ argmax argmin argsort argwhere asin asin_ asinh asinh_ atan atan2
        atan2_ atan_ atanh atanh_ baddbmm baddbmm_ bernoulli bernoulli_ bfloat16 bincount
        bitwise_and bitwise_and_ bitwise_left_shift bitwise_not bitwise_not_ bitwise_or bitwise_or_
        bitwise_right_shift bitwise_xor bitwise_xor_ bmm bool byte ceil ceil_ char cholesky clamp
        clamp_ clamp_max clamp_max_ clamp_min clamp_min_ clip clip_ clone contiguous copy_ copysign
        copysign_ corrcoef cos cos_ cosh cosh_ count_nonzero cov cpu cross cummax cummin cumprod
        cumprod_ cumsum cumsum_ cuda deg2rad deg2rad_ det diag diag_embed diagflat diagonal_scatter
        diff digamma digamma_ dist div div_ divide divide_ dot double eq eq_ erf erf_ erfc erfc_
        erfinv erfinv_ exp exp2 exp2_ exp_ expm1 expm1_ exponential_ fill_ fill_diagonal_ fix
        flatten flip fliplr flipud float float_power floor floor_ floor_divide floor_divide_ fmax
        fmin fmod fmod_ frac frac_ gather ge ge_ ger greater greater_equal gt gt_ half hardshrink
        heaviside histc hypot hypot_ index_add index_add_ index_copy index_copy_ index_fill
        index_fill_ index_put index_put_ index_reduce index_select inner int inverse isclose
        isfinite isinf isnan isneginf isposinf isreal kron kthvalue ldexp le le_ lerp lerp_ less
        less_equal lgamma lgamma_ log log10 log10_ log1p log1p_ log2 log2_ log_ log_softmax
        logaddexp logaddexp2 logcumsumexp logdet logical_and logical_and_ logical_not logical_not_
        logical_or logical_or_ logical_xor logical_xor_ logit logit_ logsumexp long lt lt_
        masked_fill masked_fill_ masked_scatter masked_scatter_ masked_select matmul matrix_exp
        matrix_power max maximum mean median min minimum mm mode msort mul mul_ multinomial multiply
        multiply_ mv nan_to_num nan_to_num_ nanmean nanmedian nanquantile nansum narrow_copy ne ne_
        neg neg_ negative negative_ new_full new_ones new_tensor new_zeros nextafter nonzero norm
        normal_ not_equal numpy outer pinverse positive pow pow_ prod put put_ quantile rad2deg
        rad2deg_ random_ ravel reciprocal reciprocal_ relu relu_ remainder remainder_ renorm renorm_
        repeat repeat_interleave reshape reshape_as roll rot90 round round_ rsqrt rsqrt_ scatter
        scatter_ scatter_add scatter_add_ scatter_reduce scatter_reduce_ select_scatter sgn sgn_
        short sigmoid sigmoid_ sign sign_ signbit sin sin_ sinc sinc_ sinh sinh_ slice_scatter
        slogdet softmax sort sqrt sqrt_ square square_ std sub sub_ subtract subtract_ sum svd take
        take_along_dim tan tan_ tanh tanh_ tile to topk trace tril tril_ triu triu_ true_divide
        true_divide_ trunc trunc_ type type_as unfold uniform_ unique unique_consecutive var vdot
        where xlogy zero_
        """,
)

_MODULE: Final = _plain(
    """
        bias children double eval extra_repr float forward half in_features out_features
        named_buffers named_children named_modules named_parameters buffers parameters modules
        register_buffer register_parameter requires_grad_ to train training weight zero_grad
        num_embeddings embedding_dim normalized_shape eps p dim append add_module
        """
)

TABLE: Final[dict[type, Rules]] = {
    int: _plain("bit_length real imag numerator denominator conjugate is_integer"),
    float: _plain("real imag conjugate is_integer as_integer_ratio"),
    complex: _plain("real imag conjugate"),
    str: _plain(
        """
        casefold count endswith find index isalnum isalpha isascii isdecimal isdigit isidentifier
        islower isnumeric isprintable isspace istitle isupper rfind rindex startswith
        """
    )
    | _each(
        _counted,
        """
        capitalize lower lstrip partition removeprefix removesuffix rpartition rsplit rstrip
        split splitlines strip swapcase title upper
        """,
    )
    | _each(_wide, "center expandtabs ljust rjust zfill")
    | {"join": _joining, "replace": _replacing, "format": _formatting, "encode": _coding},
    bytes: _plain("count endswith find hex index startswith") | {"join": _joining, "decode": _coding},
    list: _plain("append clear insert pop")
    | _each(_of_list, "count index remove reverse sort")
    | _each(_counted, "copy")
    | _each(_extending, "extend"),
    tuple: _each(_of_list, "count index"),
    dict: _plain("clear get items keys pop popitem setdefault values move_to_end")
    | _each(_counted, "copy")
    | _each(_extending, "update"),
    set: _plain("add clear discard isdisjoint issubset issuperset pop remove")
    | _each(_counted, "copy")
    | _each(
        _extending,
        "difference difference_update intersection intersection_update symmetric_difference update union",
    ),
    frozenset: _plain("isdisjoint issubset issuperset") | _each(_extending, "difference intersection union"),
    collections.deque: _plain("append appendleft clear maxlen pop popleft rotate")
    | _each(_of_list, "count index remove reverse")
    | _each(_counted, "copy")
    | _each(_extending, "extend extendleft"),
    collections.Counter: _each(_counted, "most_common") | _plain("total") | _each(_extending, "subtract"),
    range: _plain("start stop step count index"),
    slice: _plain("start stop step indices"),
    types.GeneratorType: _plain("send close"),
    types.FunctionType: _NAMED,
    types.BuiltinFunctionType: _NAMED,
    types.MethodType: _NAMED,
    ClassView: _NAMED,
    KindView: _NAMED,
    BaseException: _plain("args add_note value"),
    enum.Enum: _plain("name value"),
    torch.Size: _plain("numel"),
    torch.dtype: _plain("is_floating_point is_complex itemsize is_signed to_real to_complex"),
    torch.device: _plain("type index"),
    torch.finfo: _plain("bits eps max min tiny dtype smallest_normal resolution"),
    torch.iinfo: _plain("bits max min dtype"),
    torch.Generator: _plain("manual_seed initial_seed device"),
    torch.Tensor: _TENSOR_PLAIN
    | _TENSOR_MEASURED
    | {"tolist": _numbers, "new_empty": _zeroed, "grad": _dense},
    torch.nn.Module: _MODULE,
    np.ndarray: _plain(
        "T mT dtype flatten itemsize nbytes ndim real imag shape size squeeze swapaxes transpose item fill"
    )
    | _each(
        _measured,
        """
        all any argmax argmin argsort astype clip compress conj copy cumprod cumsum diagonal dot max
        mean min nonzero prod ravel repeat reshape round searchsorted sort std sum take tobytes
        trace var
        """,
    )
    | {"tolist": _numbers},
    np.generic: _plain("dtype item itemsize nbytes ndim real imag shape size")
    | _each(_measured, "astype all any max mean min round sum"),
    np.dtype: _plain("name kind itemsize"),
    Envoy: _each(_value, "output input inputs")
    | _plain("next path modules named_modules device")
    | {"trace": _with_inputs}
    | {"get": _get, "skip": _skip},
    PointGroup: _plain("place") | {"skip": _skip},
    NamedPoints: {},
    InterleavingTracer: _plain("result iter all next stop barrier cache model") | {"invoke": _with_inputs},
    CacheView: _plain("output input inputs keys values items"),
    Entry: _plain("output input inputs"),
}
"""What may be had of objects of each type."""

SETTABLE: Final[dict[type, frozenset[str]]] = {
    torch.Tensor: frozenset({"data", "grad", "requires_grad"}),
    Envoy: frozenset({"output", "input", "inputs"}),
}
"""What may be assigned; of engine objects, also whatever waits for a value (``guards``)."""


def rules_of(kind: type) -> Rules:
    """Return the rules for a type, its bases' included."""
    found: Rules = {}
    for base in reversed(kind.__mro__):
        found.update(TABLE.get(base, ()))
    return found


__all__ = ["PLAIN", "SETTABLE", "TABLE", "Rules", "rules_of"]
