"""Modules of other stages, on the stage where blocks run: named, shown and asked like those that are there.

vLLM puts placeholders where other stages have modules, without anything inside. Blocks name what is inside.
So each stage describes its modules to the last one, which makes stand-ins of the same classes: without
weights, with the plain attributes, and never called by the model.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from vllm.model_executor.models.utils import PPMissingLayer

from nnsight_engine.envoys.envoy import Envoy
from nnsight_engine.vllm_backend.model_outline import description_of
from nnsight_engine.vllm_backend.traces.errors import StageError

Description = tuple[str, str, str, str, str, dict[str, Any], list[str]]
"""Path, the class's module and name, what the module says of itself, the path of the same module if it was
listed before, plain attributes, and the names of all that does not travel."""

_PLAIN = (type(None), bool, int, float, str)
_MAX_ITEMS = 64
_NESTED = "impl"
"""An attribute whose own plain attributes are wanted: of vLLM's attention, what computes it."""


class Caller(Protocol):
    """Calls modules of other stages."""

    def call(self, stage: int, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the module at ``path`` gives."""

    def lacking(self, stage: int, path: str, name: str) -> Exception:
        """Return the error for something of the module at ``path`` that is there alone."""


def described(model: torch.nn.Module) -> list[Description]:
    """Describe the modules that this stage has, parents before children."""
    first: dict[int, str] = {}
    found: list[Description] = []
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, PPMissingLayer):
            continue
        known, kind = first.setdefault(id(module), path), type(module)
        plain = {name: value for name, value in vars(module).items() if name[0] != "_" and _is_plain(value)}
        if _NESTED in vars(module):
            plain[_NESTED] = {
                name: value for name, value in vars(vars(module)[_NESTED]).items() if _is_plain(value)
            }
        names = [*module._parameters, *module._buffers]  # noqa: SLF001 - their names, not the tensors
        names += [name for name in vars(module) if name[0] != "_" and name not in plain]
        same_as = known if known != path else ""
        found.append(
            (path, kind.__module__, kind.__qualname__, description_of(module), same_as, plain, names)
        )
    return found


def _is_plain(value: Any) -> bool:
    if type(value) in {tuple, list}:
        return len(value) <= _MAX_ITEMS and all(type(item) in _PLAIN for item in value)
    return type(value) in _PLAIN


class RemoteModule(torch.nn.Module):
    """Mixed in before the class of a module that another stage has.

    Attributes:
        stage: Which one.
        path_elsewhere: Where it is below the model.
        caller: Calls it there.
    """

    stage: int
    path_elsewhere: str
    description: str
    caller: Caller
    names_elsewhere: frozenset[str]

    def __getattr__(self, name: str) -> Any:
        """Look a name up as torch does, and say of what is elsewhere that it is."""
        if name in self.__dict__["names_elsewhere"]:
            raise self._lacking(name)
        return super().__getattr__(name)

    def _lacking(self, name: str) -> Exception:
        caller: Caller = self.__dict__["caller"]
        path = f"model.{self.path_elsewhere}" if self.path_elsewhere else "model"
        return caller.lacking(self.stage, path, name)

    def extra_repr(self) -> str:
        """Return what the module says of itself."""
        return self.description

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: there would be none."""
        del args, kwargs
        raise self._lacking("parameters()")

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: there would be none."""
        del args, kwargs
        raise self._lacking("buffers()")

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: it would be empty."""
        del args, kwargs
        raise self._lacking("state_dict()")


class RemoteModuleEnvoy(Envoy):
    """Stands for a module of another stage: its values come from there, and calls go there."""

    def __call__(self, *args: Any, hook: bool = False, **kwargs: Any) -> Any:
        """Have the module called where it is, apart from the model's run."""
        del hook
        module: Any = self._module
        return module.caller.call(module.stage, str(self.path), args, kwargs)


class SpanningEnvoy(Envoy):
    """Stands for a module that every stage runs a part of, such as the model itself."""

    @property
    def source(self) -> Any:
        """Refuse: an operation inside would be met by some stages only."""
        raise StageError.spanning(str(self.path), "The source")

    def __call__(self, *args: Any, hook: bool = False, **kwargs: Any) -> Any:
        """Refuse in a block; see ``Envoy`` otherwise."""
        if self._interleaver.current is not None:
            raise StageError.spanning(str(self.path), "A call")
        return super().__call__(*args, hook=hook, **kwargs)


def spanning_paths(layers: str) -> list[str]:
    """Return the paths, below the model, of the modules that every stage runs: all that hold the layers."""
    parts = layers.split(".")[:-1]
    return [".".join(parts[:length]) for length in range(len(parts) + 1)]


def stand_ins(
    model: torch.nn.Module, stages: Sequence[Sequence[Description]], caller: Caller
) -> dict[str, torch.nn.Module]:
    """Return what stands in the places of vLLM's placeholders, by path.

    Args:
        model: The last stage's part.
        stages: What the other stages have, in order.
        caller: Calls modules there.
    """
    found: dict[str, torch.nn.Module] = {}
    known: list[dict[str, torch.nn.Module]] = [{} for _ in stages]
    missing = [path for path, module in model.named_modules() if isinstance(module, PPMissingLayer)]
    for place in missing:
        for stage, entries in enumerate(stages):
            below = [entry for entry in entries if entry[0] == place or entry[0].startswith(f"{place}.")]
            if below:
                found[place] = tree(below, stage, caller, known[stage])
                break
    return found


def tree(
    entries: Sequence[Description], stage: int, caller: Caller, modules: dict[str, torch.nn.Module]
) -> torch.nn.Module:
    """Return a stand-in with all below it, parents before children in ``entries``.

    Args:
        entries: What ``described`` gave.
        stage: Where they are.
        caller: Calls modules there.
        modules: Those of the same stage made so far, by path; what is made is added.
    """
    top = entries[0][0]
    for entry in entries:
        path, same_as = entry[0], entry[4]
        known = modules.get(same_as) if same_as else None
        module = modules[path] = known or _stand_in(entry, stage, caller)
        if path != top:
            parent, _, name = path.rpartition(".")
            modules[parent].add_module(name, module)
    return modules[top]


def _stand_in(entry: Description, stage: int, caller: Caller) -> torch.nn.Module:
    path, module_name, class_name, description, _, plain, names = entry
    kind = _mixed(module_name, class_name)
    made: torch.nn.Module = object.__new__(kind)  # vLLM's own __new__ would look for a kernel
    vars(made)["names_elsewhere"] = frozenset()
    torch.nn.Module.__init__(made)
    if _NESTED in plain:
        plain = {**plain, _NESTED: SimpleNamespace(**plain[_NESTED])}
    vars(made).update(plain)
    vars(made).update(
        stage=stage,
        path_elsewhere=path,
        description=description,
        caller=caller,
        names_elsewhere=frozenset(names) - plain.keys(),
    )
    return made


@functools.cache
def _mixed(module_name: str, class_name: str) -> type[torch.nn.Module]:
    """Return the class of stand-ins for modules of a class."""
    try:
        found: Any = importlib.import_module(module_name)
        for part in class_name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):  # a class made inside a function
        found = torch.nn.Module
    return type(class_name.rpartition(".")[2], (RemoteModule, found), {"__module__": module_name})


def envoy_classes(
    known: Mapping[type[torch.nn.Module], type[Envoy]],
    modules: Iterable[torch.nn.Module],
    calls: type[RemoteModuleEnvoy] = RemoteModuleEnvoy,
) -> dict[type[torch.nn.Module], type[Envoy]]:
    """Return the classes that stand for stand-ins: those of the real modules, but calls go elsewhere.

    Args:
        known: The real modules'.
        modules: The roots of the stand-ins.
        calls: Makes the calls.
    """
    kinds = {type(module) for root in modules for module in root.modules()}
    return {kind: _calling_elsewhere(_known_for(known, kind), calls) for kind in kinds}


def _known_for(
    known: Mapping[type[torch.nn.Module], type[Envoy]], kind: type[torch.nn.Module]
) -> type[Envoy]:
    return next((known[base] for base in kind.__mro__ if base in known), Envoy)


def _calling_elsewhere(kind: type[Envoy], calls: type[RemoteModuleEnvoy]) -> type[Envoy]:
    return calls if kind is Envoy else type(kind.__name__, (calls, kind), {})
