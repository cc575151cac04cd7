"""Names that tests and code give as strings, which no type checker follows when something is renamed.

Many of the tests that use them start an engine and run with few commits; this finds them with each.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

PROJECT: Final = Path(__file__).resolve().parents[2]
PRODUCT: Final = ("api_schemas", "app", "nnsight_engine")
WORKER: Final = "nnsight_engine/vllm_backend/worker.py"
REPLICA: Final = "app/replicas/replica.py"


def calls(*folders: str) -> Iterator[tuple[str, ast.Call, str]]:
    """Yield each call of an attribute, with the place of the call and the attribute's name."""
    for folder in folders:
        for path in sorted((PROJECT / folder).rglob("*.py")):
            if "node_modules" in path.parts:
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    yield f"{path.relative_to(PROJECT)}:{node.lineno}", node, node.func.attr


def text_of(node: ast.expr | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def methods(file: str) -> set[str]:
    """Return the methods of all classes of a file."""
    tree = ast.parse((PROJECT / file).read_text(encoding="utf-8"))
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {one.name for node in classes for one in node.body if isinstance(one, functions)}


def test_methods_called_in_the_workers_exist() -> None:
    called = {
        (where, name)
        for where, call, function in calls("app", "benchmarks", "nnsight_engine", "tests/e2e", "tests/guide")
        if function == "collective_rpc"
        or (function == "call" and ast.unparse(call.func).endswith("host.call"))
        if call.args and (name := text_of(call.args[0])) is not None
    }
    assert len(called) > 15
    assert {(where, name) for where, name in called if name not in methods(WORKER)} == set()


def test_methods_called_in_the_replicas_exist() -> None:
    called = set()
    for where, call, function in calls("app/replicas"):
        if function == "broadcast":
            called.add((where, text_of(call.args[0])))
        called |= {(where, text_of(one.value)) for one in call.keywords if one.arg == "method_name"}
    assert len(called) >= 2
    assert {(where, name) for where, name in called if name not in methods(REPLICA)} == set()


def imported_names(tree: ast.Module) -> dict[str, str]:
    """Return the dotted path of each name that a file imports from the product."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in PRODUCT:
            names |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
    return names


def replacements() -> Iterator[tuple[str, str, str]]:
    """Yield the attributes of the product that tests replace: the test's file, the owner's path, the name."""
    for path in sorted((PROJECT / "tests").rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if "setattr(" not in source:
            continue
        tree = ast.parse(source)
        names = imported_names(tree)
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if node.func.attr != "setattr" or not node.args:
                continue
            dotted = text_of(node.args[0])
            if dotted is not None:
                owner, _, name = dotted.rpartition(".")
            else:
                first, _, rest = ast.unparse(node.args[0]).partition(".")
                owner = ".".join(filter(None, [names.get(first, ""), rest]))
                name = text_of(node.args[1]) or ""
            if owner.split(".")[0] in PRODUCT and name:
                yield str(path.relative_to(PROJECT)), owner, name


def test_attributes_that_tests_replace_exist() -> None:
    replaced = list(replacements())
    assert len(replaced) > 100
    assert [one for one in replaced if not is_there(*one[1:])] == []


def is_there(owner: str, name: str) -> bool:
    return inspect.getattr_static(resolved(owner), name, None) is not None


def resolved(dotted: str) -> Any:
    """Return a module, or what lies in one."""
    try:
        return importlib.import_module(dotted)
    except ModuleNotFoundError:
        owner, _, name = dotted.rpartition(".")
        if not owner:
            raise
        return getattr(resolved(owner), name)
