"""Count the project's size: lines by folder, and the files that run for one request.

    python scripts/size.py             # lines and files of each folder, and of everything
    python scripts/size.py --journeys  # serves the bundled model, and profiles one request of each kind

A journey is the set of our files of which a function runs while the request does, in the server's, the
engine's and the client's process. Processes of sandboxes cannot write, so theirs are missing.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
PACKAGES = ("api_schemas", "app", "nnsight_engine")
COLUMNS = ("code", "docstrings", "blank", "imports", "comments", "all", "files", "classes")
TRACED = """
from nnsight_engine import BUNDLED_MODEL_NAME, VLLM
model = VLLM(BUNDLED_MODEL_NAME, remote={url!r})
{begin}
"""
JOURNEYS: dict[str, dict[str, object]] = {
    "plain": {},
    "steered": {"interventions": [{"op": "steer", "at": "layers.3.output", "vector": [0.1] * 576}]},
}
CLIENTS = {
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
    if parser.parse_args().journeys:
        for name, files in journeys().items():
            print(f"{name:10} {len(files):4} files")
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
        control = Path(folder)
        (control / "sitecustomize.py").write_text(PROFILER.format(project=f"{PROJECT}/", control=folder))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        path = os.pathsep.join([folder, str(PROJECT)])
        env = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "NNSIGHT_ENGINE_DATA_DIR": folder}
        command = [sys.executable, "-m", "app", "serve", "--port", str(port)]
        server = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # noqa: S603
        try:
            _wait(url, server)
            found = {name: _of_body(url, control, body) for name, body in JOURNEYS.items()}
            return found | {name: _of_client(url, control, env, code) for name, code in CLIENTS.items()}
        finally:
            server.terminate()
            server.wait(60)


def _wait(url: str, server: subprocess.Popen[bytes]) -> None:
    while True:
        try:
            urllib.request.urlopen(f"{url}/health/ready", timeout=5)  # noqa: S310 - of this machine
        except OSError:
            if server.poll() is not None:
                raise RuntimeError("the server has ended") from None
            time.sleep(1)
        else:
            return


def _of_body(url: str, control: Path, body: dict[str, object]) -> set[str]:
    data = json.dumps({"prompt": "The", "max_tokens": 3, **body}).encode()

    def send() -> None:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/completions", data, headers)  # noqa: S310 - as above
        with urllib.request.urlopen(request) as answer:  # noqa: S310
            answer.read()

    send()
    _switch(control, is_on=True)
    send()
    return _switch(control, is_on=False)


def _of_client(url: str, control: Path, env: dict[str, str], code: str) -> set[str]:
    begin = f"import pathlib, time\ndef run():{code.replace(chr(10), chr(10) + '    ')}\nrun()"
    script = control / "client.py"
    marks = f"pathlib.Path({str(control / 'on')!r}).touch(); time.sleep(0.5)\nrun()\ntime.sleep(0.3)"
    ends = f"pathlib.Path({str(control / 'on')!r}).unlink(); time.sleep(0.5)"
    script.write_text("\n".join([TRACED.format(url=url, begin=begin), marks, ends]))
    for old in control.glob("*.files"):
        old.unlink()
    subprocess.run([sys.executable, str(script)], env=env, check=True, timeout=300)  # noqa: S603
    return _collected(control)


def _switch(control: Path, *, is_on: bool) -> set[str]:
    """Begin to record, or end it and return the files."""
    if is_on:
        for old in control.glob("*.files"):
            old.unlink()
        (control / "on").touch()
        time.sleep(0.5)
        return set()
    time.sleep(0.3)
    (control / "on").unlink()
    time.sleep(0.5)
    return _collected(control)


def _collected(control: Path) -> set[str]:
    names = {line for path in control.glob("*.files") for line in path.read_text().splitlines()}
    packages = tuple(f"{PROJECT}/{package}/" for package in PACKAGES)
    return {name for name in names if name.startswith(packages)}


if __name__ == "__main__":
    sys.exit(main())
