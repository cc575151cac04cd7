"""Import hooks that make ``import nnsight`` return this library.

``nnsight.x`` is the same module as ``nnsight_engine.x`` under a second name, so classes and options are
identical however they were imported. An installed original keeps the name unless the caller forces it.
"""

# ruff: noqa: ARG002 - the import system decides what finders and loaders are given

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from nnsight_engine.compat import first_of_output
from nnsight_engine.core.read_listener import ReadListener

OLD, OURS = "nnsight", "nnsight_engine"


class OriginalInstalledError(RuntimeError):
    """The name ``nnsight`` belongs to the original package in this environment or program."""


def install(*, force: bool = False) -> None:
    """Make ``import nnsight`` and its submodules return this library; repeated calls do nothing.

    From then on, ``output[0]`` of decoder blocks that no longer return a tuple causes a warning, see
    ``first_of_output``.

    Args:
        force: Install the hooks even if the original is installed.

    Raises:
        OriginalInstalledError: The original is imported already, or is installed and ``force`` is not set.
    """
    if any(isinstance(finder, _Renamed) for finder in sys.meta_path):
        return
    if OLD in sys.modules:
        raise OriginalInstalledError(f"{OLD} is imported already; call install() before anything imports it")
    origin = _original()
    if origin is not None and not force:
        raise OriginalInstalledError(
            f"{OLD} itself is installed, at {origin}; uninstall it, or pass force=True to hide it here"
        )
    sys.meta_path.insert(0, _Renamed())
    sys.meta_path.append(_MissingNameFinder())
    first_of_output.listen()
    ReadListener.missing_is_none = True


def uninstall() -> None:
    """Undo ``install``; modules that were imported stay valid where they are referenced."""
    first_of_output.stop_listening()
    ReadListener.missing_is_none = False
    sys.meta_path[:] = [
        finder for finder in sys.meta_path if not isinstance(finder, _Renamed | _MissingNameFinder)
    ]
    for name in [name for name in sys.modules if name == OLD or name.startswith(f"{OLD}.")]:
        if sys.modules[name].__name__.startswith(OURS):
            del sys.modules[name]


class _Renamed(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find ``nnsight.x`` as the module ``nnsight_engine.x``; None for names of other packages."""
        if fullname != OLD and not fullname.startswith(f"{OLD}."):
            return None
        ours = OURS + fullname.removeprefix(OLD)
        spec = _spec(ours)
        if spec is None:
            raise _unknown(ours)
        is_package = spec.submodule_search_locations is not None
        return ModuleSpec(fullname, _SameModule(ours), origin=spec.origin, is_package=is_package)


class _SameModule(Loader):
    def __init__(self, name: str) -> None:
        self.name = name
        self.spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module of our name; its spec is kept, as the import system replaces it."""
        module = importlib.import_module(self.name)
        self.spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec  # the import system has just replaced it by the spec of the other name


class _MissingNameFinder(MetaPathFinder):
    """Raises an error that lists the available names, unlike the default message; the last finder."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.startswith(f"{OURS}."):
            raise _unknown(fullname)
        return None


def _spec(name: str) -> ModuleSpec | None:
    """Return a module's spec; None if it or a package around it is missing."""
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return None


def _unknown(ours: str) -> ModuleNotFoundError:
    """Return the error for a module that we lack, with the names that its package has."""
    parent, _, name = ours.rpartition(".")
    package = importlib.import_module(parent)
    modules = [module.name for module in pkgutil.iter_modules(getattr(package, "__path__", ()))]
    offered = sorted({*getattr(package, "__all__", ()), *modules})
    package_name = OLD + parent.removeprefix(OURS)
    return ModuleNotFoundError(
        f"{package_name} has no {name!r} in {OURS}, which replaces it here; it has {', '.join(offered)}",
        name=f"{package_name}.{name}",
    )


def _original() -> str | None:
    """Return the location of the original package; a plain folder of that name does not count."""
    spec = importlib.util.find_spec(OLD)
    return spec.origin if spec is not None and spec.has_location else None
