from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterable, Iterator

from nnsight_engine.vllm_backend.steps.vllm_names import UsedNames
from nnsight_engine.vllm_backend.versions.sources import SourceName, VLLMSources, is_abstract, parameters


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
    assert isinstance(function, ast.FunctionDef)  # noqa: S101 - just parsed
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
