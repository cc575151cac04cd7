"""Navigation in a tree of envoys: children, paths, iteration over all envoys, devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, Self, cast, overload

import torch

from nnsight_engine.envoys.display import NoSuchModuleError

if TYPE_CHECKING:
    from nnsight_engine.envoys.envoy import Envoy

NOT_THERE: Final = (AttributeError, LookupError, TypeError)
"""The errors of looking up a path that does not exist; a number may refer to an object without items."""


class EnvoyTree:
    """Tree navigation of an envoy; ``Envoy`` derives from it."""

    path: str | None
    _module: torch.nn.Module
    _children: list[Envoy]
    _names: list[str]

    @overload
    def __getitem__(self, key: int) -> Envoy: ...

    @overload
    def __getitem__(self, key: slice) -> list[Envoy]: ...

    @overload
    def __getitem__(self, key: str) -> Any: ...

    def __getitem__(self, key: Any) -> Any:
        """Return a child: of a list of modules by number or slice, of a dict of modules by key."""
        if isinstance(key, str):
            return self._child(key) if key in self._names else getattr(self, key)
        return self._children[key]

    def _child(self, name: str) -> Envoy:
        return self._children[self._names.index(name)]

    def __len__(self) -> int:
        return len(self._children)

    def __iter__(self) -> Iterator[Envoy]:
        return iter(self._children)

    def __bool__(self) -> bool:
        """Return True, so that an envoy without children is not falsy."""
        return True

    def modules(
        self,
        include_fn: Callable[[Envoy], bool] | None = None,
        names: bool = False,  # noqa: FBT001, FBT002 - the documented signature
    ) -> list[Any]:
        """Return this envoy and all below it, depth first, each parent before its children.

        Args:
            include_fn: Filter; envoys for which it is false are omitted.
            names: Return pairs of path and envoy.
        """
        envoys = [envoy for envoy in self._walk() if include_fn is None or include_fn(envoy)]
        return [(envoy.path, envoy) for envoy in envoys] if names else envoys

    def named_modules(self, include_fn: Callable[[Envoy], bool] | None = None) -> list[tuple[str, Envoy]]:
        """Return pairs of path and envoy, see ``modules``."""
        return self.modules(include_fn, names=True)

    def _walk(self, seen: set[int] | None = None) -> Iterator[Envoy]:
        """Yield this envoy and all below it, each once; a module may be at several places."""
        seen = set() if seen is None else seen
        if id(self) not in seen:
            seen.add(id(self))
            yield cast("Envoy", self)  # only Envoy derives from this class
            for child in self._children:
                yield from child._walk(seen)

    def get(self, path: str) -> Any:
        """Return the envoy, or another attribute, at a path.

        The path may be as it is printed, ``get("model.layers.3.mlp")``, or begin below this module,
        ``get("layers.3.mlp")``. One that can be read both ways is taken as printed.
        """
        return at_path(self, path)

    # Devices.

    @property
    def device(self) -> torch.device | None:
        """Device of the first parameter; None without parameters."""
        parameter = next(self._module.parameters(), None)
        return parameter.device if parameter is not None else None

    @property
    def devices(self) -> set[torch.device]:
        """Devices of all parameters."""
        return {parameter.device for parameter in self._module.parameters()}

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move or convert the module, as ``torch.nn.Module.to`` does."""
        self._module.to(*args, **kwargs)
        return self

    def cpu(self) -> Self:
        """Move the module to the CPU."""
        return self.to("cpu")

    def cuda(self, device: int | torch.device | None = None) -> Self:
        """Move the module to a GPU."""
        self._module.cuda(device)
        return self


def at_path(start: EnvoyTree, path: str) -> Any:
    """Return what is at a path, see ``EnvoyTree.get``; raises one of ``NOT_THERE``."""
    if path == start.path:
        return start
    below = path.removeprefix(f"{start.path}.")
    try:
        return _followed(start, below)
    except NOT_THERE as error:
        if below == path:
            raise
        try:  # a module below this one may have its name
            return _followed(start, path)
        except NOT_THERE:
            raise error from None


def _followed(start: EnvoyTree, path: str) -> Any:
    """Return what is at a path below ``start``: a child, an item of a list, or an attribute for each part."""
    current: Any = start
    for part in path.split("."):
        if isinstance(current, EnvoyTree) and part in current._names:
            # A number too: a dict of modules may have them for keys, in any order.
            current = current._child(part)
        elif not part.isdecimal():
            current = getattr(current, part)
        elif not isinstance(current, EnvoyTree):
            current = current[int(part)]
        else:
            raise NoSuchModuleError(cast("Envoy", current), part)
    return current
