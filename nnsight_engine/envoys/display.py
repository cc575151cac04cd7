"""Display of an envoy: as text, in a notebook, at <TAB>, and in the error for an unknown name.

``%load_ext nnsight_engine`` adds completion after an index, for which IPython must trust our classes.
"""

from __future__ import annotations

import dataclasses
import difflib
import html
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from nnsight_engine.envoys.eproperty import eproperty
from nnsight_engine.envoys.module_options import descend

if TYPE_CHECKING:
    from nnsight_engine.envoys.envoy import Envoy

_ON_EVERY_ENVOY = frozenset({"output", "inputs", "input"})
_MAX_SUGGESTIONS = 3
_OF_EVERY_MODEL = {
    "layers": "The blocks are",
    "norm": "The final norm is",
    "embed": "The embedding is",
}


@dataclasses.dataclass(frozen=True, slots=True)
class ChildNode:
    label: str
    count: int
    node: Node


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """Display of one envoy; ``title`` is its class or ``repr``, ``links`` are aliases further down."""

    title: str
    details: tuple[str, ...] = ()
    children: tuple[ChildNode, ...] = ()
    links: tuple[str, ...] = ()

    @property
    def is_leaf(self) -> bool:
        return not (self.details or self.children or self.links)


class NoSuchModuleError(AttributeError):
    """A name that neither an envoy nor its module has; the message suggests similar names.

    It is built when it is read, since most errors of this kind only answer a ``hasattr``.
    """

    def __init__(self, envoy: Envoy, name: str) -> None:
        super().__init__(name, name=name)
        self.envoy = envoy

    def __str__(self) -> str:
        envoy = self.envoy
        return (
            f"{type(envoy._module).__name__} at {envoy.path} has no attribute {self.name}."
            f"{_hint(envoy, str(self.name))} print(model) shows the tree."
        )


def as_text(envoy: Envoy) -> str:
    return "\n".join(_text_lines(_node(envoy)))


def as_html(envoy: Envoy) -> str:
    tree = _html(_node(envoy), "", is_open=True)
    return f'<div style="font-family: monospace; white-space: pre-wrap">{tree}</div>'


def names_of(envoy: Envoy) -> list[str]:
    attributes = object.__dir__(envoy)
    names = {*attributes, *envoy._names, *_aliases_here(envoy), *dir(envoy._module)}
    return sorted(name for name in names if name.isidentifier())


def _node(envoy: Envoy, above: frozenset[int] = frozenset()) -> Node:
    """Describe an envoy and all below it; ``above``: ids of the envoys around it, as trees may be cyclic."""
    module = envoy._module
    details = [f".{name}: {prop.description}" for name, prop in _described(type(envoy)).items()]
    if id(envoy) in above:
        return Node(f"{type(module).__name__} at {envoy.path}, see above")
    within = above | {id(envoy)}
    children = [
        (name, _node(child, within)) for name, child in zip(envoy._names, envoy._children, strict=True)
    ]
    links = tuple(
        f"({alias}) -> {path}" for alias, path in _aliases_here(envoy).items() if path not in envoy._names
    )
    if not (children or details or links):
        return Node(repr(module))
    extra = module.extra_repr()
    return Node(
        module._get_name(),
        (*(extra.split("\n") if extra else ()), *details),
        tuple(_grouped(envoy, children)),
        links,
    )


def _grouped(envoy: Envoy, children: list[tuple[str, Node]]) -> Iterator[ChildNode]:
    """Yield the children; consecutive numbered ones of equal display are one, ``(0-11): 12 x Block``."""
    start = 0
    while start < len(children):
        name, node = children[start]
        end = start + 1
        while name.isdigit() and end < len(children) and _continues(envoy, children, start, end):
            end += 1
        count = end - start
        label = "/".join([name, *_names_for(envoy, name)]) if count == 1 else f"{name}-{children[end - 1][0]}"
        yield ChildNode(label, count, node)
        start = end


def _continues(envoy: Envoy, children: list[tuple[str, Node]], start: int, at: int) -> bool:
    """Return whether child ``at`` has the next number, and looks like ``start``, where the group begins."""
    name, node = children[at]
    aliases = _names_for(envoy, name) or _names_for(envoy, children[start][0])
    return name == str(int(children[at - 1][0]) + 1) and node == children[start][1] and not aliases


def _names_for(envoy: Envoy, child: str) -> list[str]:
    aliases = envoy._alias
    return aliases.names_for(child) if aliases is not None else []


def _aliases_here(envoy: Envoy) -> dict[str, str]:
    """Return the aliases that lead somewhere from this envoy, with the path of each."""
    aliases = envoy._alias
    if aliases is None:
        return {}
    by_alias = {}
    for alias in aliases.names:
        for path in aliases.resolve(alias):
            if descend(envoy, path) is not None:
                by_alias[alias] = path
                break
    return by_alias


def _described(cls: type) -> dict[str, eproperty]:
    """Return a class's properties with a description, without those that every envoy has."""
    properties: dict[str, eproperty] = {}
    for base in reversed(cls.__mro__):
        for name, value in vars(base).items():
            is_shown = isinstance(value, eproperty) and value.description and not name.startswith("_")
            if is_shown and name not in _ON_EVERY_ENVOY:
                properties[name] = value
            else:
                properties.pop(name, None)  # overridden by another attribute of that name
    return properties


def _text_lines(node: Node) -> list[str]:
    """Return a node and those below it as lines, as torch prints modules."""
    if node.is_leaf:
        return node.title.split("\n")
    lines = list(node.details)
    for child in node.children:
        title, *rest = _text_lines(child.node)
        lines += [f"({child.label}): {_times(child)}{title}", *rest]
    lines += node.links
    return [f"{node.title}(", *textwrap.indent("\n".join(lines), "  ").split("\n"), ")"]


def _html(node: Node, prefix: str, *, is_open: bool) -> str:
    """Return a node and those below it as foldable HTML; ``prefix`` is its label in its parent."""
    head = html.escape(prefix + node.title)
    if node.is_leaf:
        return f"<div>{head}</div>"
    inner = [f"<div>{html.escape(line)}</div>" for line in node.details]
    inner += [
        _html(child.node, f"({child.label}): {_times(child)}", is_open=False) for child in node.children
    ]
    inner += [f"<div>{html.escape(line)}</div>" for line in node.links]
    return (
        f"<details{' open' if is_open else ''}><summary>{head}</summary>"
        f'<div style="padding-left: 2em">{"".join(inner)}</div></details>'
    )


def _times(child: ChildNode) -> str:
    return f"{child.count} x " if child.count > 1 else ""


def _hint(envoy: Envoy, name: str) -> str:
    """Return where the missing name is, or names that may be meant, as a sentence; empty without any."""
    counterpart = _counterpart(envoy, name)
    if counterpart:
        return f" {counterpart}."
    paths_by_name = _places(envoy)
    if name in paths_by_name:
        path, *more_paths = paths_by_name[name]
        return f" There is {path}{f', and {len(more_paths)} more' if more_paths else ''}."
    public = {candidate for candidate in names_of(envoy) if not candidate.startswith("_")}
    everybodys = {*dir(torch.nn.Module), *object.__dir__(envoy)}
    specific = {*envoy._names, *_aliases_here(envoy), *(public - everybodys)}
    similar = _near(name, specific) or _near(name, public)
    if similar:
        return f" Did you mean {' or '.join(repr(candidate) for candidate in similar)}?"
    similar_below = [paths_by_name[candidate][0] for candidate in _near(name, set(paths_by_name))]
    return f" Did you mean {' or '.join(similar_below)}?" if similar_below else ""


def _counterpart(envoy: Envoy, name: str) -> str:
    """Return what this model has in place of another family's module of that name; empty if nothing."""
    architecture = getattr(envoy._root.__dict__.get("_points"), "architecture", None)
    root = envoy._root.path
    if architecture is None or envoy.path not in {root, f"{root}.{architecture.body}"}:
        return ""
    counterpart = architecture.counterpart(name)
    if counterpart is None:
        return ""
    path, standard = counterpart
    return f"{_OF_EVERY_MODEL[standard]} {root}.{path}, and {root}.{standard} in every model"


def _places(envoy: Envoy) -> dict[str, list[str]]:
    """Return the paths of all envoys below this one, by their last part."""
    by_name: dict[str, list[str]] = {}
    for below in envoy._walk():
        if below is not envoy:
            by_name.setdefault(str(below.path).rpartition(".")[2], []).append(str(below.path))
    return by_name


def _near(name: str, known_names: set[str]) -> list[str]:
    return difflib.get_close_matches(
        name, sorted(candidate for candidate in known_names if not candidate.isdecimal()), _MAX_SUGGESTIONS
    )


_OURS = ("nnsight_engine",)


def load_ipython_extension(shell: Any) -> None:
    """Allow the shell's completer to evaluate attributes and items of envoys."""
    from IPython.core.guarded_eval import EVALUATION_POLICIES  # noqa: PLC0415 - there if a shell calls this

    completer = shell.Completer
    policy: Any = EVALUATION_POLICIES[completer.evaluation]
    completer.use_jedi = False  # Jedi would be the only completer used, and it does not evaluate
    completer.policy_overrides = {
        **completer.policy_overrides,
        "allowed_getattr_external": {*policy.allowed_getattr_external, _OURS},
        "allowed_getitem_external": {*policy.allowed_getitem_external, _OURS},
    }
