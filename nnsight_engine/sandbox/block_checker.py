"""Early, clear errors for code that cannot run in a sandbox process, from its syntax alone.

Not a security boundary: code that hides its intentions passes, and then the process refuses it.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any, Final

from nnsight_engine.serialization import DATA_ONLY, Policy, SandboxError
from nnsight_engine.tracing.blocks import Nested

MODULES: Final = (
    "abc", "collections", "collections.abc", "contextlib", "dataclasses", "einops", "enum", "functools",
    "itertools", "math", "nnsight_engine", "numpy", "numpy.linalg", "operator", "random", "statistics",
    "time", "torch", "torch.autograd", "torch.cuda", "torch.fft", "torch.linalg", "torch.nn",
    "torch.nn.functional", "torch.special", "typing",
)  # fmt: skip
"""Modules that code may import, see ``load_modules``."""

_PACKAGES: Final = frozenset(
    {
        *(module.partition(".")[0] for module in MODULES),
        *("builtins", "nnsight", "transformers", "_collections", "_functools", "_operator", "_random"),
    }
)
"""Packages whose objects a message may name: those above, and where Python and models define such objects."""
_NEEDED: Final = (
    "datetime", "decimal", "einops._torch_specific", "encodings.ascii", "encodings.latin_1",
    "encodings.utf_16", "encodings.utf_16_be", "encodings.utf_16_le", "encodings.utf_32", "numpy.fft",
    "numpy.ma", "numpy.polynomial", "numpy.random", "pathlib", "transformers.modeling_outputs", "uuid",
)  # fmt: skip
"""Modules that others load when they are first used, or that variables of a block need."""
_SHOWN: Final = ", ".join(MODULES)
_SPECIAL_ATTRIBUTES: Final = frozenset(
    {
        "__name__", "__init__", "__call__", "__repr__", "__str__", "__len__", "__bool__", "__iter__",
        "__next__", "__contains__", "__getitem__", "__setitem__", "__delitem__", "__enter__", "__exit__",
        "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__add__", "__radd__",
        "__iadd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__",
        "__floordiv__", "__mod__", "__pow__", "__matmul__", "__rmatmul__", "__neg__", "__pos__", "__abs__",
        "__invert__", "__and__", "__or__", "__xor__", "__post_init__",
    }
)  # fmt: skip
"""Special attributes that code may use: the methods of its own classes, and the name of a type."""
_FRAME_ATTRIBUTES: Final = frozenset(
    {
        "tb_frame", "tb_next", "f_back", "f_builtins", "f_code", "f_globals", "f_locals", "f_trace",
        "co_code", "gi_frame", "gi_code", "gi_yieldfrom", "cr_await", "cr_frame", "cr_code", "cr_origin",
        "ag_await", "ag_frame", "ag_code",
    }
)  # fmt: skip
_Refusals = Iterator[tuple[ast.AST, str, str]]
"""Nodes that are refused: the node, what it is, and an alternative."""


def load_modules() -> None:
    """Import all modules that code may import, before a process is confined and can no longer open files."""
    for module in (*MODULES, *_NEEDED):
        with contextlib.suppress(ModuleNotFoundError):  # einops is optional
            importlib.import_module(module)


def check_syntax(node: Any, filename: str) -> None:
    """Refuse a definition or ``Nested`` block that could not run: SandboxError names the first such line."""
    first_refusal: tuple[tuple[int, int], str, str] | None = None
    for syntax_tree in _parts(node):
        for syntax_node in ast.walk(syntax_tree):
            rule = _RULES.get(type(syntax_node))
            for refused_node, feature, instead in rule(syntax_node) if rule is not None else ():
                position = (getattr(refused_node, "lineno", 0), getattr(refused_node, "col_offset", 0))
                if first_refusal is None or position < first_refusal[0]:
                    first_refusal = (position, feature, instead)
    if first_refusal is not None:
        (line, _), feature, instead = first_refusal
        raise _refusal(feature, f", at line {line} of {filename}", instead, line)


def _parts(node: Any) -> list[ast.AST]:
    if not isinstance(node, Nested):
        return [node]
    return [*node.node.items[node.item + 1 :], *node.node.body]


def _refusal(feature: str, location: str = "", instead: str = "", line: int | None = None) -> SandboxError:
    advice = f"; {instead}" if instead else ""
    return SandboxError(
        f"{feature} is not part of the sandbox's Python{location}{advice} (see docs/sandbox-language.md)",
        line,
    )


def _check_module(node: ast.AST, module: str) -> _Refusals:
    if module not in MODULES:
        yield node, f"the module `{module}`", f"there are {_SHOWN}"


def _import(node: ast.Import) -> _Refusals:
    for alias in node.names:
        yield from _check_module(node, alias.name)


def _import_from(node: ast.ImportFrom) -> _Refusals:
    """Yield what is refused of an import, with an alternative."""
    if node.level or node.module is None:
        yield node, "an import by a relative name", "import by the full name, or send the function along"
        return
    for alias in node.names:
        if alias.name == "*":
            yield node, "`import *`", "name what is imported"
        elif f"{node.module}.{alias.name}" in MODULES:
            continue
        elif alias.name.startswith("_"):
            yield node, f"the name `{alias.name}` of `{node.module}`", "import public names"
        else:
            yield from _check_module(node, node.module)


def _attribute(node: ast.Attribute) -> _Refusals:
    name = node.attr
    if name in _FRAME_ATTRIBUTES:
        yield node, f"the attribute `{name}`", "code there has no access to frames and byte code"
    elif _is_special(name) and name not in _SPECIAL_ATTRIBUTES:
        yield node, f"the attribute `{name}`", "use public attributes; `type(x).__name__` is available"


def _name(node: ast.Name) -> _Refusals:
    if _is_special(node.id) and node.id != "__name__":
        yield node, f"the name `{node.id}`", ""


def _async(node: ast.AST) -> _Refusals:
    yield node, "`async` and `await`", "a block runs within one step of the model, which has no event loop"


def _comprehension(node: ast.comprehension) -> _Refusals:
    if node.is_async:
        yield from _async(node.iter)


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


_RULES: Final = MappingProxyType[type[ast.AST], Callable[[Any], _Refusals]](
    {
        ast.Import: _import,
        ast.ImportFrom: _import_from,
        ast.Attribute: _attribute,
        ast.Name: _name,
        ast.comprehension: _comprehension,
        ast.AsyncFunctionDef: _async,
        ast.AsyncFor: _async,
        ast.AsyncWith: _async,
        ast.Await: _async,
    }
)


def _check_name(module: str, name: str) -> bool:
    if module.partition(".")[0] in _PACKAGES or DATA_ONLY.may_import(module, name):
        return True
    raise _refusal(f"the module `{module}`", instead=f"there are {_SHOWN}")


CHECKED: Final = Policy(_check_name, allow_source=True, check=check_syntax)
"""The policy for untrusted code, for a reader inside a sandbox process: it may run anything, see above."""
