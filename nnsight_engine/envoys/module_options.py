"""``rename=``, aliases that let the same code work on several models; and ``envoys=``, classes of envoys.

``rename`` maps a path to one name or several. ``"mlp": "feedforward"`` gives every module called ``mlp`` an
alias, ``"transformer.h": "layers"`` every module that has the path. The original name stays valid; a leading
dot changes nothing. A path may begin with the name of the root, ``"model.transformer.h"``, and ``"model":
"lm"`` names the root, if the root has no module of that name.

One ``rename`` may serve several architectures: a model needs one of the paths of each alias. An alias without
any is refused. ``envoys`` has classes by module class or, with precedence, by the longest matching end of
path.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

if TYPE_CHECKING:
    from nnsight_engine.envoys.envoy import Envoy

Rename = Mapping[str, str | list[str] | tuple[str, ...]]


class Aliases:
    """The aliases of a ``rename``, by alias and by path."""

    def __init__(self, rename: Rename) -> None:
        """Raise TypeError if it is no mapping of names to names, ValueError for an invalid path or alias."""
        if not isinstance(rename, Mapping):
            raise TypeError(f"rename maps paths to names, {{'transformer.h': 'layers'}}, got {rename!r}")
        self.rename = rename
        self._paths: dict[str, list[str]] = {}
        self._aliases: dict[str, list[str]] = {}
        items: Mapping[Any, Any] = rename  # untyped user input
        for name, aliases_given in items.items():
            aliases = [aliases_given] if isinstance(aliases_given, str) else aliases_given
            if not isinstance(aliases, (list, tuple)) or not all(
                isinstance(text, str) for text in (name, *aliases)
            ):
                raise TypeError(
                    f"rename maps a path to a name or a list of names, got {name!r}: {aliases_given!r}"
                )
            for alias in aliases:
                self._add(name, alias)

    def _add(self, name: str, alias: str) -> None:
        """Add one alias for the modules at path ``name``; ValueError if one of them is not valid."""
        plain = alias.removeprefix(".")
        if not plain.isidentifier() or not all(
            part.isidentifier() or part.isdigit() for part in _parts(name)
        ):
            raise ValueError(
                f"rename={{{name!r}: {alias!r}}}: the key is a path such as 'transformer.h', "
                "the value a single name"
            )
        self._paths.setdefault(plain, []).append(name)
        self._aliases.setdefault(name, []).append(plain)

    @property
    def names(self) -> list[str]:
        return list(self._paths)

    def refuse(self, taken: Container[str]) -> None:
        """Raise ValueError if an alias is an attribute of the envoy (``taken``), and never looked up."""
        for alias, paths in self._paths.items():
            if alias in taken:
                raise ValueError(
                    f"rename={{{paths[0]!r}: {alias!r}}}: every envoy has a {alias!r} of its own; "
                    "choose another name"
                )

    def resolve(self, alias: str) -> list[str]:
        return [path.removeprefix(".") for path in self._paths.get(alias, ())]

    def ways_to(self, path: tuple[str, ...]) -> list[tuple[str, ...]]:
        """Return a module's path from the root, and all its spellings with aliases.

        An alias replaces a whole path, and paths may themselves be written with aliases, so each spelling
        found is expanded again. This ends, since a replacement never makes a path longer.
        """
        ways = [path]
        for way in ways:
            for name, aliases in self._aliases.items():
                parts = _parts(name)
                for start in range(1, len(way) - len(parts) + 1):
                    if list(way[start : start + len(parts)]) == parts:
                        spelt = ((*way[:start], alias, *way[start + len(parts) :]) for alias in aliases)
                        ways.extend(spelling for spelling in spelt if spelling not in ways)
        return ways

    def names_for(self, child: str) -> list[str]:
        return [*self._aliases.get(child, []), *self._aliases.get(f".{child}", [])]


def by_alias(envoy: Envoy, name: str, tried: frozenset[tuple[int, str]] = frozenset()) -> Any:
    """Return what an alias leads to from an envoy, or None; ``tried``, lookups in progress, ends cycles."""
    lookup = (id(envoy), name)
    aliases = envoy._alias
    if aliases is None or lookup in tried:
        return None
    paths = aliases.resolve(name)
    reached = (descend(envoy, path, tried | {lookup}) for path in [*paths, *_below_root(envoy, paths)])
    return next((reachable for reachable in reached if reachable is not None), None)


def descend(envoy: Envoy, path: str, tried: frozenset[tuple[int, str]] = frozenset()) -> Any:
    """Return what is at a path below an envoy, whose parts may be aliases; None if there is nothing."""
    current: Any = envoy
    for part in path.split(".") if path else ():
        if "_names" not in getattr(current, "__dict__", ()):
            return None  # a parameter, for example, has nothing below it
        if part in current._names:
            current = current._child(part)
        elif hasattr(current._module, part):
            current = getattr(current, part)
        else:
            current = by_alias(current, part, tried)
    return current


def _below_root(envoy: Envoy, paths: list[str]) -> list[str]:
    """Return the paths that begin with the root's name, without it; none unless the envoy is the root."""
    if not envoy._is_root:
        return []
    root = str(envoy.path)
    return [path.removeprefix(root).removeprefix(".") for path in paths if f"{path}.".startswith(f"{root}.")]


def check_aliases(envoy: Envoy) -> None:
    """Raise ValueError for an alias that is an attribute of the envoy, or refers to two modules."""
    aliases = envoy._alias
    if aliases is None:
        return
    if envoy._is_root:
        aliases.refuse(dir(type(envoy)))
    for name in aliases.names:
        paths = aliases.resolve(name)
        if len(paths) > 1:
            reached = {id(module): path for path in paths if (module := descend(envoy, path)) is not None}
            if len(reached) > 1:
                chosen, other, *_ = reached.values()
                raise ValueError(
                    f"rename gives the name {name!r} to both {chosen!r} and {other!r} of {envoy.path}; "
                    "leave one of them out"
                )


def check_reached(root: Envoy, known: Container[str] = ()) -> None:
    """Raise ValueError if an alias refers to nothing; ``known``: beginnings of paths that are no modules."""
    aliases = root._alias
    if aliases is None:
        return
    for alias in aliases.names:
        paths = aliases.resolve(alias)
        if any(path.partition(".")[0] in known for path in paths):
            continue
        if not any(alias in envoy._names or by_alias(envoy, alias) is not None for envoy in root._walk()):
            raise ValueError(
                f"rename={{{paths[0]!r}: {alias!r}}}: this model has no {paths[0]!r}; print(model) shows its "
                "modules"
            )


def ends_with(path: str, end: str, aliases: Aliases | None) -> bool:
    """Return whether a path from the root ends in ``end``, ``h.0.attn``, which may be in aliases."""
    wanted = tuple(_parts(end))
    parts = tuple(path.split("."))
    ways = [parts] if aliases is None else aliases.ways_to(parts)
    return any(way[-len(wanted) :] == wanted for way in ways)


def _parts(name: str) -> list[str]:
    return name.removeprefix(".").split(".")


EnvoyMap: TypeAlias = "type[Envoy] | Mapping[type[torch.nn.Module] | str, type[Envoy]] | None"
"""Envoy classes of modules: one for all, or by the module's class or path; None means ``Envoy``."""


def envoy_class(
    envoys: EnvoyMap, module: torch.nn.Module, path: str, aliases: Aliases | None, default: type[Envoy]
) -> type[Envoy]:
    """Return a module's envoy class: by the longest fitting end of its path, by its class, or the default."""
    if envoys is None:
        return default
    if isinstance(envoys, type):
        return envoys
    ends = [key for key in envoys if isinstance(key, str) and ends_with(path, key, aliases)]
    if ends:
        return envoys[max(ends, key=lambda end: len(_parts(end)))]
    return next((envoys[base] for base in type(module).__mro__ if base in envoys), default)


def check_envoys(envoys: Any, base: type[Envoy]) -> None:
    """Raise TypeError unless it is a subclass of ``base``, or a mapping to such by class or end of path."""
    items = list(envoys.items()) if isinstance(envoys, Mapping) else [(object, envoys)]
    if envoys is None or all(
        _is_key(key) and isinstance(value, type) and issubclass(value, base) for key, value in items
    ):
        return
    raise TypeError(
        "envoys= takes a subclass of Envoy, or a mapping from classes of modules or ends of paths to such "
        f"classes, {{Attention: MyEnvoy, 'mlp.up_proj': MyEnvoy}}; got {envoys!r}"
    )


def _is_key(key: Any) -> bool:
    return isinstance(key, type) or (isinstance(key, str) and all(_parts(key)))
