"""What the packages import, against what ``pyproject.toml`` asks for."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any, Final

import pytest

PROJECT: Final = Path(__file__).resolve().parents[2]
OURS: Final = {"api_schemas", "app", "benchmarks", "examples", "loadtests", "nnsight_engine", "tests"}
BESIDE: Final = {"uvicorn.protocols.http.httptools_impl": "httptools"}
"""Modules that need more than the package they are in asks for."""
BROUGHT: Final = {"IPython"}
"""Packages that only serve who has them anyway: a shell's completion."""
SERVER: Final = ("serve", "cpu", "gpu", "ray", "redis")
EXTRAS: Final = {
    "api_schemas": (),
    "nnsight_engine": ("datasets", "diffusion", "viz", *SERVER),
    "app": SERVER,
    "loadtests": (*SERVER, "loadtest"),
    "benchmarks": (*SERVER, "datasets", "dev"),
    "examples": ("viz",),
}
"""By package: what it may need beside the project's own dependencies."""


def test_all_imports_are_declared() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    distributions = packages_distributions()
    missing = {
        f"{path.relative_to(PROJECT)}: {name}"
        for package, extras in EXTRAS.items()
        for path in (PROJECT / package).rglob("*.py")
        for name in imported(path)
        if asked(project, extras).isdisjoint(map(plain, distributions.get(name, [name])))
    }
    assert missing == set()


@pytest.mark.parametrize("line", ["import httptools", "from uvicorn.protocols.http.httptools_impl import X"])
def test_an_undeclared_import_is_found(tmp_path: Path, line: str) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        f"import os\nfrom app.settings import Settings\ndef late():\n    {line}\n", encoding="utf-8"
    )
    assert set(imported(file)) - {"uvicorn"} == {"httptools"}


def imported(path: Path) -> Iterator[str]:
    """Yield the packages of others that a file imports, wherever it does."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            if name in BESIDE:
                yield BESIDE[name]
            package = name.partition(".")[0]
            if package not in {*OURS, *BROUGHT, *sys.stdlib_module_names}:
                yield package


def asked(project: dict[str, Any], extras: tuple[str, ...]) -> set[str]:
    lists = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras)]
    return {plain(re.split(r"[^\w.-]", one)[0]) for asked_for in lists for one in asked_for}


def plain(name: str) -> str:
    """Return a distribution's name as all spellings of it are compared."""
    return re.sub(r"[-_.]+", "-", name).lower()
