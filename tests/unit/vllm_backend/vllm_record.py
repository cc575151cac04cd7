"""Records of vLLM's versions: the names that the engine uses, with their signatures, as stubs in one file.

    python -m tests.unit.vllm_backend.vllm_record 0.33.0

downloads the wheel of a version (some hundred MB) and writes its record. ``--sources FOLDER`` reads an
unpacked wheel instead.
"""

from __future__ import annotations

import argparse
import ast
import collections
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from tests.unit.vllm_backend.vllm_names import USED_NAMES, UsedNames
from tests.unit.vllm_backend.vllm_sources import SourceName, VLLMSources, is_abstract

FOLDER: Final = Path(__file__).parent / "vllm_records"
COMMAND: Final = "python -m tests.unit.vllm_backend.vllm_record"
_MODULE: Final = "# module "
_KEPT: Final = {"abstractmethod", "cached_property", "classmethod", "property", "staticmethod"}
_PLATFORM: Final = ("--python-version", "3.12", "--platform", "manylinux_2_28_x86_64")


def record(sources: VLLMSources, used: Iterable[UsedNames] = USED_NAMES) -> str:
    """Return the stubs of the used names that a version has."""
    modules: dict[str, dict[str, str]] = collections.defaultdict(dict)
    classes: dict[str, dict[str, dict[str, str]]] = collections.defaultdict(dict)
    for names in used:
        for owner in names.owners:
            module, _, cls = owner.partition(":")
            wanted = [*names.read, *names.called, *names.overridden]
            if not cls:
                found = {name: sources.find(module, name) for name in wanted}
                modules[module] |= {name: _stub(name, one) for name, one in found.items() if one is not None}
            elif (definition := sources.find(module, cls)) is not None:
                members = sources.members(definition)
                if names.is_subclassed:
                    wanted += [name for name, one in members.items() if is_abstract(one)]
                stubs = classes[module].setdefault(cls, {})
                stubs |= {name: _stub(name, members[name]) for name in wanted if name in members}
    lines = [
        f"# vLLM {sources.version}, see vllm_record.py", f"{_MODULE}vllm._version",
        f"__version__ = {sources.version!r}",
    ]  # fmt: skip
    for module in sorted({*modules, *classes}):
        lines += [f"{_MODULE}{module}", *(text for _, text in sorted(modules[module].items()))]
        for cls, stubs in sorted(classes[module].items()):
            # A class of the same name that the module's names have stands before and is replaced.
            lines += [f"class {cls}:", "    pass"]
            lines += [f"    {line}" for _, text in sorted(stubs.items()) for line in text.split("\n")]
    return "\n".join([*lines, ""])


def unpacked(text: str, folder: Path) -> VLLMSources:
    """Write a record as modules into an empty folder, and return them as a version's sources."""
    for part in text.split(f"\n{_MODULE}")[1:]:
        module, _, body = part.partition("\n")
        place = folder.joinpath(*module.split("."))
        place.mkdir(parents=True, exist_ok=True)
        (place / "__init__.py").write_text(body, encoding="utf-8")
    return VLLMSources(folder)


def _stub(name: str, found: SourceName) -> str:
    node = found.node
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return f"{name} = None"
    (copy,) = ast.parse(f"def {name}({ast.unparse(node.args)}): ...").body
    assert isinstance(copy, ast.FunctionDef)
    for argument in _all_arguments(copy.args):
        argument.annotation = None
    copy.args.defaults = [ast.Constant(...) for _ in copy.args.defaults]
    copy.args.kw_defaults = [None if one is None else ast.Constant(...) for one in copy.args.kw_defaults]
    decorators = {ast.unparse(one).partition("(")[0].rpartition(".")[2] for one in node.decorator_list}
    copy.decorator_list = [ast.Name(one) for one in sorted(decorators & _KEPT)]
    return ast.unparse(copy).replace(":\n    ...", ": ...")


def _all_arguments(arguments: ast.arguments) -> Iterator[ast.arg]:
    yield from (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    yield from (one for one in (arguments.vararg, arguments.kwarg) if one is not None)


def _downloaded(version: str, folder: Path) -> Path:
    """Return a folder with the Python files of a version's wheel."""
    command = (sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", *_PLATFORM)
    subprocess.run([*command, "--dest", str(folder), f"vllm=={version}"], check=True)
    (wheel,) = folder.glob("vllm-*.whl")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(folder, [name for name in files.namelist() if name.endswith(".py")])
    return folder


def main() -> None:
    """Write a version's record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version")
    parser.add_argument("--sources", type=Path, help="a folder with the package, in place of a download")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sources = VLLMSources(args.sources or _downloaded(args.version, Path(folder)))
        if sources.version != args.version:
            parser.error(f"the sources are of {sources.version or 'an unknown version'}")
        FOLDER.mkdir(exist_ok=True)
        (FOLDER / f"{args.version}.txt").write_text(record(sources), encoding="utf-8")


if __name__ == "__main__":
    main()
