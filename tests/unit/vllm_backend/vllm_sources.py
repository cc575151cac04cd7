"""vLLM's sources as syntax trees, compared with the names that the engine uses.

Griffe does not know attributes that are assigned outside ``__init__``, of which vLLM has many.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from tests.unit.vllm_backend.vllm_names import UsedNames

_PACKAGE: Final = "vllm"
_METHODS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclasses.dataclass(frozen=True, slots=True)
class SourceName:
    """A name that ``module`` defines; ``node`` is None for other values than functions and classes."""

    module: str
    node: _Function | ast.ClassDef | None


class VLLMSources:
    """The sources of one version of vLLM; ``folder`` contains the package ``vllm``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names: dict[str, dict[str, ast.stmt | None] | None] = {}
        self._members: dict[ast.ClassDef, dict[str, SourceName]] = {}

    @property
    def version(self) -> str:
        """The version without its local part, such as ``0.32.0``; empty if it is not known."""
        tree = self._tree("vllm._version")
        for node in () if tree is None else tree.body:
            if isinstance(node, ast.Assign) and "__version__" in {
                target.id for target in node.targets if isinstance(target, ast.Name)
            }:
                value = node.value
                return str(value.value).partition("+")[0] if isinstance(value, ast.Constant) else ""
        return ""

    def find(self, module: str, name: str) -> SourceName | None:
        """Return what a name of a module refers to; imports are followed as far as they stay in vLLM."""
        for _ in range(10):
            names = self._names_of(module)
            if names is None or name not in names:
                is_module = names is not None and self._path(f"{module}.{name}") is not None
                return SourceName(f"{module}.{name}", None) if is_module else None
            node = names[name]
            if not isinstance(node, ast.ImportFrom):
                definition = node if isinstance(node, (*_METHODS, ast.ClassDef)) else None
                return SourceName(module, definition)
            origin = self._origin(module, node)
            if origin.partition(".")[0] != _PACKAGE:
                return SourceName(origin, None)
            name = next((one.name for one in node.names if (one.asname or one.name) == name), name)
            module = origin
        return None

    def members(self, found: SourceName) -> dict[str, SourceName]:
        """Return the methods and attributes of a class, those of its base classes in vLLM included."""
        cls = found.node
        if not isinstance(cls, ast.ClassDef):
            return {}
        if cls not in self._members:
            own = {name: SourceName(found.module, node) for name, node in _members(cls).items()}
            bases = [self._base(found.module, base) for base in cls.bases]
            inherited = [self.members(base) for base in bases if base is not None]
            self._members[cls] = dict(collections.ChainMap(own, *inherited))
        return self._members[cls]

    def _base(self, module: str, base: ast.expr) -> SourceName | None:
        if isinstance(base, ast.Subscript):  # a generic class with its parameters
            base = base.value
        if isinstance(base, ast.Name):
            return self.find(module, base.id)
        if isinstance(base, ast.Attribute) and isinstance(base.value, ast.Name):
            names = self._names_of(module) or {}
            imported = names.get(base.value.id)
            if isinstance(imported, ast.ImportFrom):
                return self.find(f"{self._origin(module, imported)}.{base.value.id}", base.attr)
        return None

    def _names_of(self, module: str) -> dict[str, ast.stmt | None] | None:
        if module not in self._names:
            tree = self._tree(module)
            names: dict[str, ast.stmt | None] = {}
            self._names[module] = None if tree is None else names
            for name, node in () if tree is None else _bound(tree.body):
                if name == "*" and isinstance(node, ast.ImportFrom):
                    above = self._names_of(self._origin(module, node)) or {}
                    names.update(dict.fromkeys((one for one in above if not one.startswith("_")), node))
                else:
                    names[name] = node
        return self._names[module]

    def _tree(self, module: str) -> ast.Module | None:
        path = self._path(module)
        return None if path is None else ast.parse(path.read_bytes())

    def _path(self, module: str) -> Path | None:
        base = self._folder.joinpath(*module.split("."))
        found = (path for path in (base / "__init__.py", base.with_name(f"{base.name}.py")) if path.is_file())
        return next(found, None)

    def _origin(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        path = self._path(module)
        is_package = path is not None and path.name == "__init__.py"
        parts = module.split(".")
        parts = parts[: len(parts) - node.level + is_package]
        return ".".join([*parts, node.module] if node.module else parts)


def _bound(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt | None]]:
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if not {"overload", "setter"} & _decorators(node):
                yield node.name, node
        elif isinstance(node, ast.ImportFrom):
            yield from ((one.asname or one.name, node) for one in node.names)
        elif isinstance(node, ast.Import):
            yield from ((one.asname or one.name.partition(".")[0], None) for one in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = (one for target in targets for one in ast.walk(target) if isinstance(one, ast.Name))
            yield from ((one.id, None) for one in names)
        else:  # statements with blocks of their own, such as `if TYPE_CHECKING`
            for block in ("body", "orelse", "finalbody"):
                yield from _bound(getattr(node, block, []))
            for handler in getattr(node, "handlers", ()):
                yield from _bound(handler.body)


def _members(node: ast.ClassDef) -> dict[str, _Function | ast.ClassDef | None]:
    members: dict[str, _Function | ast.ClassDef | None] = {}
    for method in node.body:
        if isinstance(method, _METHODS) and method.args.args:
            own = method.args.args[0].arg
            for one in ast.walk(method):
                if (
                    isinstance(one, ast.Attribute)
                    and isinstance(one.ctx, ast.Store)
                    and isinstance(one.value, ast.Name)
                    and one.value.id == own
                ):
                    members[one.attr] = None
    for name, bound in _bound(node.body):
        members[name] = bound if isinstance(bound, (*_METHODS, ast.ClassDef)) else None
    return members


def _decorators(node: _Function | ast.ClassDef) -> set[str]:
    return {ast.unparse(one).partition("(")[0].rpartition(".")[2] for one in node.decorator_list}


def is_abstract(found: SourceName) -> bool:
    return isinstance(found.node, _METHODS) and "abstractmethod" in _decorators(found.node)


def parameters(found: SourceName, *, is_member: bool) -> ast.arguments | None:
    node = found.node
    if not isinstance(node, _METHODS):
        return None
    decorators = _decorators(node)
    if decorators & {"property", "cached_property"}:
        return None
    if not is_member or "staticmethod" in decorators:
        return node.args
    arguments = ast.parse(f"def f({ast.unparse(node.args)}): ...").body[0]
    assert isinstance(arguments, ast.FunctionDef)
    first = arguments.args.posonlyargs or arguments.args.args
    del first[:1]
    return arguments.args


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """A name (``vllm.v1.worker.gpu_worker:Worker.init_device``) that is not as this project needs it."""

    name: str
    change: str
    is_overridden: bool

    def __str__(self) -> str:
        return f"{self.name} ({'overridden' if self.is_overridden else 'read'}): {self.change}"


def differences(sources: VLLMSources, used: Iterable[UsedNames]) -> list[Difference]:
    """Return the names that are gone or have another signature; once, if several owners share the change."""
    found: list[Difference] = []
    for names in used:
        changes: dict[tuple[str, str], Difference] = {}
        for owner in names.owners:
            for one in _compared(sources, owner, names):
                member = one.name.partition(":")[2].partition(".")[2]
                changes.setdefault((member or one.name, one.change), one)
        found += changes.values()
    return found


def _compared(sources: VLLMSources, owner: str, names: UsedNames) -> Iterator[Difference]:
    module, _, cls = owner.partition(":")
    if not cls:
        for name in (*names.called, *names.read):
            found = sources.find(module, name)
            yield from _change(f"{module}:{name}", found, names.called.get(name), is_member=False)
        return
    found = sources.find(module, cls)
    if found is None or not isinstance(found.node, ast.ClassDef):
        yield Difference(owner, "the class is gone", names.is_subclassed)
        return
    members = sources.members(found)
    for name, signature in names.overridden.items():
        yield from _change(
            f"{owner}.{name}", members.get(name), signature, is_member=True, is_overridden=True
        )
    for name in (*names.called, *names.read):
        yield from _change(f"{owner}.{name}", members.get(name), names.called.get(name), is_member=True)
    if names.is_subclassed:
        for name, member in members.items():
            if is_abstract(member) and name not in {*names.overridden, *names.implemented}:
                yield Difference(f"{owner}.{name}", "a new abstract method", is_overridden=True)


def _change(
    name: str,
    found: SourceName | None,
    signature: str | None,
    *,
    is_member: bool,
    is_overridden: bool = False,
) -> Iterator[Difference]:
    if found is None:
        yield Difference(name, "the name is gone", is_overridden)
        return
    if is_overridden and is_abstract(found):  # overrides call what they replace
        yield Difference(name, "it has no implementation any more", is_overridden)
        return
    if signature is None:
        return
    actual = parameters(found, is_member=is_member)
    if actual is None:
        yield Difference(name, "it is not a function any more", is_overridden)
        return
    for change in signature_changes(_parsed(signature), actual, is_overridden=is_overridden):
        yield Difference(name, change, is_overridden)


def _parsed(signature: str) -> ast.arguments:
    (function,) = ast.parse(f"def f({signature}): ...").body
    assert isinstance(function, ast.FunctionDef)
    return function.args


def signature_changes(
    expected: ast.arguments, actual: ast.arguments, *, is_overridden: bool
) -> Iterator[str]:
    """Yield how a signature differs from what this project relies on.

    If ``is_overridden``, vLLM calls with its parameters, and all must be accepted (``**others`` passes them
    on); otherwise this project calls it and passes those without a default.
    """
    yield from _lost(expected, actual)
    places, required = _positional(actual), _required(actual)
    known = {*_positional(expected), *_names(expected.kwonlyargs)}
    for name in (*places, *_names(actual.kwonlyargs)):
        if name in known:
            if name in required and name not in _required(expected):
                yield f"parameter `{name}` is required now"
        elif name in required:
            yield f"new required parameter `{name}`"
        elif is_overridden and expected.kwarg is None:
            yield f"new parameter `{name}`, which the override does not accept"


def _lost(expected: ast.arguments, actual: ast.arguments) -> Iterator[str]:
    places, keywords = _positional(actual), _names(actual.kwonlyargs)
    for index, name in enumerate(_positional(expected)):
        if places[index : index + 1] == [name]:
            continue
        if name in places or name in keywords:
            yield f"parameter `{name}` has moved"
        elif actual.vararg is None or index < len(places):
            yield f"parameter `{name}` is gone"
    for name in _names(expected.kwonlyargs):
        if name not in places and name not in keywords and actual.kwarg is None:
            yield f"parameter `{name}` is gone"


def _positional(arguments: ast.arguments) -> list[str]:
    return [*_names(arguments.posonlyargs), *_names(arguments.args)]


def _names(parameters_: Iterable[ast.arg]) -> list[str]:
    return [one.arg for one in parameters_]


def _required(arguments: ast.arguments) -> set[str]:
    places = _positional(arguments)
    keywords = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return {
        *places[: len(places) - len(arguments.defaults)],
        *(one.arg for one, default in keywords if default is None),
    }
