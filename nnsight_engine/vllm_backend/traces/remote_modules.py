"""Stand-ins for modules of other stages, on the stage where blocks run.

vLLM puts empty placeholders where other stages have modules, but blocks refer to the modules inside.
Stand-ins have the same classes and plain attributes, but no weights, and the model never calls them.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from vllm.model_executor.models.utils import PPMissingLayer

from nnsight_engine.envoys.envoy import Envoy
from nnsight_engine.vllm_backend.module_tree import description_of
from nnsight_engine.vllm_backend.traces.errors import StageError

Description = tuple[str, str, str, str, str, dict[str, Any], list[str], int]
"""The description of one module.

Its items: the path, the class's module and name, the module's ``extra_repr``, the path of the same module
if it was listed before, the plain attributes, the names of all attributes that are not sent, and the size of
the last axis of its weight, 0 without one.
"""

_PLAIN = (type(None), bool, int, float, str)
_MAX_ITEMS = 64
_BACKEND_ATTRIBUTE = "impl"
"""An attribute whose own plain attributes are included: in vLLM's attention, the backend implementation."""


MissingAttribute = Callable[[str, str], Exception]
"""Returns the error for a path and an attribute that exists on the module's own side only."""


def described(model: torch.nn.Module) -> list[Description]:
    """Return the descriptions of this stage's modules, parents before children.

    The stage that runs blocks makes stand-ins from them; they are sent as plain tuples.
    """
    first_paths: dict[int, str] = {}
    descriptions: list[Description] = []
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, PPMissingLayer):
            continue
        first_path, kind = first_paths.setdefault(id(module), path), type(module)
        plain = {name: value for name, value in vars(module).items() if name[0] != "_" and _is_plain(value)}
        if _BACKEND_ATTRIBUTE in vars(module):
            plain[_BACKEND_ATTRIBUTE] = {
                name: value
                for name, value in vars(vars(module)[_BACKEND_ATTRIBUTE]).items()
                if _is_plain(value)
            }
        names_not_sent = [*module._parameters, *module._buffers]  # noqa: SLF001 - their names only
        names_not_sent += [name for name in vars(module) if name[0] != "_" and name not in plain]
        same_as = first_path if first_path != path else ""
        class_module, class_name = kind.__module__, kind.__qualname__
        extra_repr, width = description_of(module), weight_width(module)
        descriptions.append(
            (path, class_module, class_name, extra_repr, same_as, plain, names_not_sent, width)
        )
    return descriptions


def weight_width(module: torch.nn.Module) -> int:
    """Return the size of the last axis of a module's weight; 0 if it has none."""
    if isinstance(module, RemoteModule):
        return module.weight_width
    weight = getattr(module, "weight", None)
    return int(weight.shape[-1]) if isinstance(weight, torch.Tensor) and weight.ndim else 0


def joined(stages: Iterable[Iterable[Description]]) -> list[Description]:
    """Return a model's descriptions, in its order; a module that spans stages is as the last has it."""
    by_path = {entry[0]: entry for entries in stages for entry in entries}
    return list(by_path.values())


def _is_plain(value: Any) -> bool:
    if type(value) in {tuple, list}:
        return len(value) <= _MAX_ITEMS and all(type(item) in _PLAIN for item in value)
    return type(value) in _PLAIN


class RemoteModule(torch.nn.Module):
    """Mixin placed before the class of a module that another stage has.

    ``names_elsewhere`` are attributes that exist there only; ``description`` is its ``extra_repr`` there.
    """

    weight_width: int
    stage: int
    path_elsewhere: str
    description: str
    missing_attribute: MissingAttribute
    names_elsewhere: frozenset[str]

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__["names_elsewhere"]:
            raise self._lacking(name)
        return super().__getattr__(name)

    def _lacking(self, name: str) -> Exception:
        path = f"model.{self.path_elsewhere}" if self.path_elsewhere else "model"
        error: Exception = self.__dict__["missing_attribute"](path, name)
        return error

    def extra_repr(self) -> str:
        return self.description

    def named_parameters(self, *_args: Any, **_kwargs: Any) -> Any:
        """Raise: a stand-in has none."""
        raise self._lacking("parameters()")

    def named_buffers(self, *_args: Any, **_kwargs: Any) -> Any:
        raise self._lacking("buffers()")

    def state_dict(self, *_args: Any, **_kwargs: Any) -> Any:
        raise self._lacking("state_dict()")


class RemoteModuleEnvoy(Envoy):
    """The envoy of a module of another stage: its values come from there, and calls are sent there."""

    def __call__(self, *args: Any, hook: bool = False, **kwargs: Any) -> Any:
        """Call the module on its own side, apart from the model's run."""
        if hook:
            self._interleaver.called_directly(str(self.path))
        module: Any = self._module
        dispatcher: Any = self._interleaver
        return dispatcher.call_elsewhere(module.stage, str(self.path), args, kwargs)


class SpanningEnvoy(Envoy):
    """The envoy of a module of which every stage runs a part, such as the model itself."""

    @property
    def source(self) -> Any:
        """Raise: an operation inside would be executed by some stages only."""
        raise StageError.spanning(str(self.path), "The source")

    def __call__(self, *args: Any, hook: bool = False, **kwargs: Any) -> Any:
        if self._interleaver.current is not None:
            raise StageError.spanning(str(self.path), "A call")
        return super().__call__(*args, hook=hook, **kwargs)


def spanning_paths(layers: str) -> list[str]:
    """Return the paths, below the model, of the modules that every stage runs: those around the layers."""
    parts = layers.split(".")[:-1]
    return [".".join(parts[:length]) for length in range(len(parts) + 1)]


def stand_ins(model: torch.nn.Module, stages: Sequence[Sequence[Description]]) -> dict[str, torch.nn.Module]:
    """Return the stand-ins that replace vLLM's placeholders in the last stage's model, by path."""
    by_path: dict[str, torch.nn.Module] = {}
    modules_by_stage: list[dict[str, torch.nn.Module]] = [{} for _ in stages]
    placeholders = [path for path, module in model.named_modules() if isinstance(module, PPMissingLayer)]
    for top in placeholders:
        for stage, entries in enumerate(stages):
            subtree = [entry for entry in entries if entry[0] == top or entry[0].startswith(f"{top}.")]
            if subtree:
                missing = functools.partial(StageError.attribute, stage=stage)
                by_path[top] = tree(subtree, missing, modules_by_stage[stage], stage)
                break
    return by_path


def tree(
    entries: Sequence[Description],
    missing_attribute: MissingAttribute,
    modules: dict[str, torch.nn.Module],
    stage: int = 0,
) -> torch.nn.Module:
    """Return the stand-in of the first entry, adding all of its subtree to ``modules``, by path.

    ``entries`` has parents first; ``missing_attribute`` makes the errors of attributes that are not sent.
    """
    top = entries[0][0]
    for entry in entries:
        path, _, _, _, same_as, *_ = entry
        known = modules.get(same_as) if same_as else None
        module = modules[path] = known or _stand_in(entry, missing_attribute, stage)
        if path != top:
            parent, _, name = path.rpartition(".")
            modules[parent].add_module(name, module)
    return modules[top]


def _stand_in(entry: Description, missing_attribute: MissingAttribute, stage: int) -> torch.nn.Module:
    """Return a module of the described class, with its plain attributes and without weights."""
    path, module_name, class_name, description, _, plain, names_not_sent, width = entry
    kind = _mixed(module_name, class_name)
    made: torch.nn.Module = object.__new__(kind)  # vLLM's own __new__ would look for a kernel
    vars(made)["names_elsewhere"] = frozenset()
    torch.nn.Module.__init__(made)
    if _BACKEND_ATTRIBUTE in plain:
        plain = {**plain, _BACKEND_ATTRIBUTE: SimpleNamespace(**plain[_BACKEND_ATTRIBUTE])}
    vars(made).update(plain)
    vars(made).update(
        stage=stage,
        path_elsewhere=path,
        description=description,
        missing_attribute=missing_attribute,
        names_elsewhere=frozenset(names_not_sent) - plain.keys(),
        weight_width=width,
    )
    return made


@functools.cache
def _mixed(module_name: str, class_name: str) -> type[torch.nn.Module]:
    """Return a stand-in's class, derived from the named class if this can be imported."""
    try:
        cls: Any = importlib.import_module(module_name)
        for part in class_name.split("."):
            cls = getattr(cls, part)
    except (ImportError, AttributeError):  # a class made inside a function
        cls = torch.nn.Module
    return type(class_name.rpartition(".")[2], (RemoteModule, cls), {"__module__": module_name})


def envoy_classes(
    known: Mapping[type[torch.nn.Module], type[Envoy]],
    modules: Iterable[torch.nn.Module],
    calls: type[RemoteModuleEnvoy] = RemoteModuleEnvoy,
) -> dict[type[torch.nn.Module], type[Envoy]]:
    """Return the envoy classes for stand-ins: those of the real modules, but with remote calls."""
    kinds = {type(module) for root in modules for module in root.modules()}
    return {kind: _calling_elsewhere(_known_for(known, kind), calls) for kind in kinds}


def _known_for(
    known: Mapping[type[torch.nn.Module], type[Envoy]], kind: type[torch.nn.Module]
) -> type[Envoy]:
    return next((known[base] for base in kind.__mro__ if base in known), Envoy)


def _calling_elsewhere(kind: type[Envoy], calls: type[RemoteModuleEnvoy]) -> type[Envoy]:
    return calls if kind is Envoy else type(kind.__name__, (calls, kind), {})
