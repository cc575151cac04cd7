"""A model's module tree without weights, for display and for names on the client."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import torch

OutlineEntry = tuple[str, str, str, str]
"""Path, class name, description, and the path under which the same module was listed before, if any."""


class OutlinedModule(torch.nn.Module):
    """Placeholder for a module of the engine, which may be in another process."""

    description = ""

    def extra_repr(self) -> str:
        return self.description

    def _get_name(self) -> str:
        return self.class_name

    class_name = "Module"


_NONE: Final[Mapping[str, torch.nn.Module]] = types.MappingProxyType({})


def outline_of(
    model: torch.nn.Module, elsewhere: Mapping[str, torch.nn.Module] = _NONE
) -> list[OutlineEntry]:
    """List a model's modules, parents before children; ``elsewhere`` are those of other processes."""
    first: dict[int, str] = {}
    entries = []
    for path, module in _walk("", model, elsewhere):
        known = first.setdefault(id(module), path)
        entries.append((path, type(module).__name__, description_of(module), known if known != path else ""))
    return entries


def _walk(
    path: str, module: torch.nn.Module, elsewhere: Mapping[str, torch.nn.Module]
) -> Iterator[tuple[str, torch.nn.Module]]:
    module = elsewhere.get(path, module)
    yield path, module
    for name, child in module._modules.items():  # noqa: SLF001 - named_children() skips repeated modules
        if child is not None:
            yield from _walk(f"{path}.{name}" if path else name, child, elsewhere)


def description_of(module: torch.nn.Module) -> str:
    """Return the module's ``extra_repr``; empty if it raises."""
    try:
        return str(module.extra_repr())
    except Exception:  # noqa: BLE001 - some use attributes that are missing in this configuration
        return ""


def outlined(entries: Sequence[OutlineEntry]) -> torch.nn.Module:
    modules: dict[str, torch.nn.Module] = {}
    for path, class_name, description, same_as in entries:
        if same_as:
            module = modules[same_as]
        else:
            module = OutlinedModule()
            module.class_name = class_name
            module.description = description
        modules[path] = module
        if path:
            parent, _, name = path.rpartition(".")
            modules[parent].add_module(name, module)
    return modules[""]
