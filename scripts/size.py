"""Count the project's size: lines by folder, and the files that run for one request.

    python -m scripts.size             # lines and files of each folder, and of everything
    python -m scripts.size --journeys  # serves the bundled model, and profiles one request of each kind
    python -m scripts.size --journeys --files  # also names the files

A journey is the set of our files of which a function runs while the request does, in the server's, the
engine's and the client's process. Processes of sandboxes cannot write, so theirs are missing.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.servers import served

PROJECT = Path(__file__).resolve().parents[1]
PACKAGES = ("api_schemas", "app", "nnsight_engine")
COLUMNS = ("code", "docstrings", "blank", "imports", "comments", "all", "files", "classes")
CLIENT = """
import json, pathlib, time, urllib.request
from nnsight_engine import BUNDLED_MODEL_NAME, VLLM
url, on = {url!r}, pathlib.Path({control!r}) / "on"
model = VLLM(BUNDLED_MODEL_NAME, remote=url)

def complete(**fields):
    data = json.dumps({{"prompt": "The", "max_tokens": 3, **fields}}).encode()
    request = urllib.request.Request(url + "/v1/completions", data, {{"Content-Type": "application/json"}})
    urllib.request.urlopen(request).read()

def run():
{code}

run()
on.touch()
time.sleep(0.5)
run()
time.sleep(0.3)
on.unlink()
time.sleep(0.5)
"""
JOURNEYS = {
    "plain": "complete()",
    "steered": """
steer = {"op": "steer", "at": "layers.3.output", "vector": [0.1] * 576}
complete(interventions=[steer])
""",
    "traced": """
with model.trace("The", max_tokens=3):
    saved = model.logits.output.save()
""",
    "job": """
with model.trace("The", max_tokens=3, blocking=False) as tracer:
    saved = model.logits.output.save()
tracer.backend.wait()
""",
}
PROFILER = """
import os, pathlib, sys, threading, time
_project, _control = {project!r}, pathlib.Path({control!r})
_paths, _is_on = set(), False

def _note(frame, event, _):
    if event == "call" and _is_on and frame.f_code.co_name != "<module>":
        _paths.add(frame.f_code.co_filename)

def _watch():
    global _is_on
    while True:
        wanted = (_control / "on").exists()
        if _is_on and not wanted:
            _write()
        if wanted and not _is_on:
            _paths.clear()
        _is_on = wanted
        time.sleep(0.05)

def _write():
    ours = sorted(path for path in set(_paths) if path.startswith(_project))
    (_control / f"{{os.getpid()}}.files").write_text("\\n".join(ours))

threading.Thread(target=_watch, daemon=True).start()
os.register_at_fork(after_in_child=lambda: threading.Thread(target=_watch, daemon=True).start())
threading.setprofile(_note)
sys.setprofile(_note)
"""


def main() -> int:
    """Print the tables; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--journeys", action="store_true", help="profile requests to a server")
    parser.add_argument("--files", action="store_true", help="name the files of each journey")
    options = parser.parse_args()
    if options.journeys:
        for name, files in journeys().items():
            print(f"{name:10} {len(files):4} files")
            if options.files:
                print(*(f"  {Path(file).relative_to(PROJECT)}" for file in sorted(files)), sep="\n")
    else:
        print_table()
    return 0


def print_table() -> None:
    """Print the lines of each folder, and of all."""
    print(f"{'folder':36}" + "".join(f"{name:>11}" for name in COLUMNS))
    total: Counter[str] = Counter()
    for package in PACKAGES:
        folders = (path for path in (PROJECT / package).iterdir() if path.is_dir())
        for folder in (PROJECT / package, *sorted(folders)):
            files = folder.glob("*.py") if folder.name == package else folder.rglob("*.py")
            sizes: Counter[str] = sum((size_of(path) for path in files), Counter())
            if sizes:
                print(_row(str(folder.relative_to(PROJECT)), sizes))
            total += sizes
    print(_row("together", total))


def size_of(path: Path) -> Counter[str]:
    """Return the counts of a file, by ``COLUMNS``; a line counts once, as the first kind that it is of."""
    text = path.read_text(encoding="utf-8")
    lines, tree = text.splitlines(), ast.parse(text)
    documented = set(_lines(_docstrings(tree)))
    imported = set(_lines(node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)))
    sizes: Counter[str] = Counter(files=1, all=len(lines))
    sizes["classes"] = sum(isinstance(node, ast.ClassDef) for node in ast.walk(tree))
    for number, line in enumerate(lines, 1):
        stripped = line.strip()
        if number in documented:
            sizes["docstrings"] += 1
        elif not stripped:
            sizes["blank"] += 1
        elif number in imported:
            sizes["imports"] += 1
        else:
            sizes["comments" if stripped.startswith("#") else "code"] += 1
    return sizes


def _lines(nodes: Iterable[ast.stmt]) -> Iterator[int]:
    for node in nodes:
        yield from range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _docstrings(tree: ast.AST) -> Iterator[ast.stmt]:
    """Yield the strings that stand alone: docstrings, and those below an attribute."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                yield node


def _row(name: str, sizes: Counter[str]) -> str:
    return f"{name:36}" + "".join(f"{sizes[column]:>11}" for column in COLUMNS)


def journeys() -> dict[str, set[str]]:
    """Return the files that run for each kind of request; every request is sent once before, unrecorded."""
    with tempfile.TemporaryDirectory() as folder:
        profiler = PROFILER.format(project=f"{PROJECT}/", control=folder)
        Path(folder, "sitecustomize.py").write_text(profiler, encoding="utf-8")
        variables = {"PYTHONPATH": os.pathsep.join([folder, str(PROJECT)]), "HF_HUB_OFFLINE": "1"}
        with served([], variables) as url:
            return {name: _journey(url, Path(folder), variables, code) for name, code in JOURNEYS.items()}


def _journey(url: str, control: Path, variables: dict[str, str], code: str) -> set[str]:
    script = control / "client.py"
    own = textwrap.indent(code, "    ")
    script.write_text(CLIENT.format(url=url, control=str(control), code=own), encoding="utf-8")
    for old in control.glob("*.files"):
        old.unlink()
    subprocess.run([sys.executable, str(script)], env=os.environ | variables, check=True, timeout=300)  # noqa: S603
    names = {line for path in control.glob("*.files") for line in path.read_text().splitlines()}
    packages = tuple(f"{PROJECT}/{package}/" for package in PACKAGES)
    return {name for name in names if name.startswith(packages)}


if __name__ == "__main__":
    sys.exit(main())
