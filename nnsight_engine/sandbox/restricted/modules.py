"""The modules that code may import, and what it finds in them: lists of names, and how each is given.

Most functions are given as they are. Those of torch and numpy are measured (``sizes``); classes come as
views; ``itertools`` counts its items; what leaves memory as it found it makes zeros.
"""

from __future__ import annotations

import functools
import importlib.util
import types
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import torch

from nnsight_engine.sandbox.restricted import torch_names
from nnsight_engine.sandbox.restricted.arguments import of_numbers
from nnsight_engine.sandbox.restricted.budget import refusal
from nnsight_engine.sandbox.restricted.guards import Guards
from nnsight_engine.sandbox.restricted.layers import charge_layer
from nnsight_engine.sandbox.restricted.library import Library
from nnsight_engine.sandbox.restricted.views import ModuleView, real

_HOMES: Final[Mapping[str, str]] = {
    "_collections": "collections", "_functools": "functools", "_operator": "operator", "_random": "random",
    "torch._tensor": "torch", "torch.functional": "torch", "torch._C._VariableFunctions": "torch",
    "torch.nn.parameter": "torch.nn", "torch.autograd.grad_mode": "torch", "torch._C": "torch",
    "torch._C._linalg": "torch.linalg", "torch._C._nn": "torch.nn.functional", "torch._C._fft": "torch.fft",
    "torch._C._special": "torch.special", "nnsight": "nnsight_engine",
    "nnsight_engine.core.saves": "nnsight_engine", "einops.einops": "einops",
    "torch.amp.autocast_mode": "torch",
    "numpy._core.fromnumeric": "numpy", "numpy._core.multiarray": "numpy", "numpy._core.numeric": "numpy",
}  # fmt: skip
"""Where what is defined elsewhere is found."""
_OF_LAYERS: Final = "torch.nn.modules."

_HAS_EINOPS: Final = importlib.util.find_spec("einops") is not None


class Modules:
    """The modules of one message's code; members are made when they are first asked for."""

    def __init__(self, guards: Guards, builtins: Mapping[str, Any]) -> None:
        """Offer what these guards look after."""
        self._guards = guards
        library = Library(guards)
        self._found: dict[tuple[str, str], Any] = {}
        self._views: dict[str, ModuleView] = {}
        self._members: dict[str, Callable[[str], Any]] = {
            "builtins": lambda name: _public(builtins, name),
            "torch": self._of_torch,
            "torch.nn": self._of_nn,
            "torch.nn.functional": self._measured(torch.nn.functional, torch_names.FUNCTIONAL),
            "torch.linalg": self._measured(torch.linalg, torch_names.LINALG),
            "torch.fft": self._measured(torch.fft, torch_names.FFT),
            "torch.special": self._measured(torch.special, torch_names.SPECIAL),
            "torch.cuda": lambda name: {"is_available": lambda: False}[name],
            "torch.autograd": self._measured(torch.autograd, frozenset({"grad"})),
            "numpy": self._of_numpy,
            "numpy.linalg": self._measured(np.linalg, torch_names.NUMPY_LINALG),
            **library.members(),
            _OUTPUTS: self._of_outputs,
            "nnsight_engine": lambda name: {"save": guards.save}[name],
        }
        if _HAS_EINOPS:
            self._members["einops"] = self._of_einops

    def imported(self, path: str, name: str | None = None) -> Any:
        """Return what an import binds.

        Raises:
            SandboxError: The module or the member is none for code.
        """
        view = self.view(path)
        if name is None:
            return view
        return self._guards.of_view(view, name)

    def find(self, path: str, name: str) -> Any:
        """Return what a message means by a name in a module; attributes of it are separated by dots."""
        path = self._home(path)
        found: Any = self.view(path)
        for part in name.split(".") if name else []:
            if isinstance(found, ModuleView):
                found = self.imported(found.path, part)
            else:
                found = self._guards.get(found, part)
        return found

    def view(self, path: str) -> ModuleView:
        """Return a module.

        Raises:
            SandboxError: It is none for code.
        """
        view = self._views.get(path)
        if view is None:
            if path not in self._members:
                raise refusal(f"the module `{path}`", f"there are {', '.join(sorted(self._shown()))}")
            view = self._views[path] = ModuleView(path, functools.partial(self._member, path))
        return view

    def _home(self, path: str) -> str:
        return "torch.nn" if path.startswith(_OF_LAYERS) else _HOMES.get(path, path)

    def _shown(self) -> list[str]:
        return [path for path in self._members if path not in {"builtins", _OUTPUTS}]

    def _member(self, path: str, name: str) -> Any:
        if (path, name) not in self._found:
            below = f"{path}.{name}"
            self._found[path, name] = (
                self.view(below) if below in self._members else self._members[path](name)
            )
        return self._found[path, name]

    # torch and numpy.

    def _measured(self, module: types.ModuleType, names: frozenset[str]) -> Callable[[str], Any]:
        def find(name: str) -> Any:
            if name not in names:
                raise KeyError(name)
            return self._call(name, getattr(module, name))

        return find

    def _call(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose result is measured."""
        call = self._guards.sizer.call

        def measured(*args: Any, **kwargs: Any) -> Any:
            return call(name, function, args, kwargs)

        measured.__name__ = name
        return measured

    def _of_torch(self, name: str) -> Any:
        if name in torch_names.EMPTY:
            return self._call(name, getattr(torch, torch_names.EMPTY[name]))
        if name in torch_names.FUNCTIONS:
            return self._call(name, getattr(torch, name))
        if name in torch_names.CONSTANTS or isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if name in torch_names.CLASSES:
            kind = getattr(torch, name)
            return self._guards.viewed(kind, kind)
        if name == "Tensor":
            return self._guards.viewed(torch.Tensor, self._new_tensor)
        raise KeyError(name)

    def _new_tensor(self, *args: Any) -> torch.Tensor:
        """Make a tensor of sizes, of zeros, or of numbers."""
        call = self._guards.sizer.call
        if args and all(type(one) is int for one in args):
            made: torch.Tensor = call("zeros", torch.zeros, args, {})
        else:
            made = call("tensor", torch.tensor, args or ([],), {"dtype": torch.get_default_dtype()})
        return made

    def _of_nn(self, name: str) -> Any:
        if name == "Parameter":
            return self._guards.viewed(torch.nn.Parameter, torch.nn.Parameter)
        if name not in torch_names.LAYERS:
            raise KeyError(name)
        kind = getattr(torch.nn, name)
        return self._guards.viewed(kind, functools.partial(self._layer, kind), is_base=True)

    def _layer(self, kind: type[torch.nn.Module], *args: Any, **kwargs: Any) -> torch.nn.Module:
        """Make a layer whose weights are not too large."""
        charge_layer(self._guards.meter, kind, args, kwargs)
        return kind(*args, **kwargs)

    def _of_numpy(self, name: str) -> Any:  # noqa: PLR0911 - one for each kind of member
        if name in torch_names.NUMPY_EMPTY:
            return self._call(name, getattr(np, torch_names.NUMPY_EMPTY[name]))
        if name == "arange":
            return self._arange
        if name in torch_names.NUMPY_FUNCTIONS:
            return self._call(name, getattr(np, name))
        if name == "dtype":
            return self._guards.viewed(np.dtype, _number_type)
        if name in torch_names.NUMPY_TYPES:
            return getattr(np, name)
        if name == "ndarray":
            return self._guards.viewed(np.ndarray, lambda *_args: _refuse_array())
        if name in torch_names.NUMPY_CONSTANTS:
            return getattr(np, name)
        raise KeyError(name)

    def _arange(self, *args: Any, **kwargs: Any) -> Any:
        start, stop, step = (0, args[0], 1) if len(args) == 1 else (*args, 1)[:3] if args else (0, 0, 1)
        self._guards.meter.charge(
            int(max(0.0, (float(stop) - float(start)) / float(kwargs.get("step", step)))) * 8
        )
        return np.arange(*args, **kwargs)

    def _of_einops(self, name: str) -> Any:
        if name not in {"einsum", "rearrange", "reduce", "repeat"}:
            raise KeyError(name)
        return self._call(name, getattr(importlib.import_module("einops"), name))

    def _of_outputs(self, name: str) -> Any:
        """Return a class of models' results, which a client may send along."""
        kind = getattr(importlib.import_module(_OUTPUTS), name, None)
        if not isinstance(kind, type) or kind.__module__ != _OUTPUTS:
            raise KeyError(name)
        return self._guards.viewed(kind, kind)


def _public(found: Mapping[str, Any], name: str) -> Any:
    if not name.isidentifier() or name.startswith("_"):
        raise KeyError(name)
    return found[name]


def _number_type(value: Any) -> Any:
    """Return a type of numbers."""
    return of_numbers(np.dtype(real(value)))


def _refuse_array() -> None:
    raise refusal("`numpy.ndarray(...)`", "use numpy.zeros")


_OUTPUTS: Final = "transformers.modeling_outputs"
