"""The code blocks of the documentation, and running those of one page in their order.

Blocks marked ``python``, ``sh`` and ``bash`` are run, unless a comment above one says why not. All Python
blocks of a page share one namespace, as cells of a notebook do, and lie in files at the lines that they have
on the page, so that errors name these. Shell blocks run under ``bash -e``, where curl fails on a refusal.

``python -m tests.guide.pages PAGE MODEL FOLDER`` runs a page that starts engines of its own.

Comments that mean something, each on the line above a block:

- ``<!-- not run: REASON -->``: this block is not run.
- ``<!-- before: CODE -->``: Python that readers know from elsewhere, run before the block.
- ``<!-- check: CODE -->``, anywhere: Python that asserts what the page says of the blocks above.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import os
import re
import subprocess
import sys
from ast import PyCF_ALLOW_TOP_LEVEL_AWAIT
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

PROJECT: Final = Path(__file__).resolve().parents[2]
SHELLS: Final = frozenset({"sh", "bash"})
RUN: Final = SHELLS | {"python"}
SHOWN: Final = frozenset({"text", "json", "yaml", "toml", "mermaid"})
"""Languages of blocks that show something and are not run."""
WITH_ENGINES: Final = (PROJECT / "docs/vllm-traces.md",)
"""Pages that start engines of their own."""
ELSEWHERE: Final = ("http://127.0.0.1:8000", "http://gpu-box:8000")
"""Where the pages have their server."""
NAMES: Final = ("HuggingFaceTB/SmolLM2-135M-Instruct", "Qwen/Qwen3-0.6B")
"""Models of the pages, in whose place the bundled one is loaded."""

_BLOCK = re.compile(
    r"(?P<comment><!--(?:(?!-->).)*-->\n)?"
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
_CHECK = re.compile(r"^ *<!-- check:\s(?P<code>.*?)-->$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!-- (not run|before):\s(.*?)\s*-->", re.DOTALL)
# A refusal of the server is the command's failure.
_PRELUDE: Final = 'curl() { command curl --no-progress-meter --fail-with-body "$@"; }\n'


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """A block of code on a page.

    Attributes:
        page: The page, from the project's folder.
        line: Where its code begins, counted from 1.
        language: The word behind its fence.
        code: What it has.
        reason: Why it is not run; empty if it is.
        before: Python that runs before it.
    """

    page: str
    line: int
    language: str
    code: str
    reason: str
    before: str

    def __str__(self) -> str:
        """Say where it is."""
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """Return the documentation: README.md, and what is in ``docs/`` but for the decisions."""
    return [PROJECT / "README.md", *sorted((PROJECT / "docs").rglob("*.md"))]


def blocks(path: Path) -> Iterator[Block]:
    """Return the blocks of a page, its checks among them as Python, in their order."""
    text = path.read_text(encoding="utf-8")
    page = str(path.relative_to(PROJECT))
    matches = sorted([*_BLOCK.finditer(text), *_CHECK.finditer(text)], key=re.Match.start)
    for found in matches:
        line = text.count("\n", 0, found.start("code")) + 1
        if found.re is _CHECK:
            yield Block(page, line, "python", found["code"], reason="", before="")
            continue
        comment = _COMMENT.match(found["comment"] or "")
        kind, words = comment.groups() if comment else ("", "")
        code = re.sub(f"^{found['indent']}", "", found["code"], flags=re.MULTILINE)
        yield Block(
            page,
            line,
            found["language"],
            code,
            reason=words if kind == "not run" else "",
            before=words if kind == "before" else "",
        )


class Page:
    """A page being run.

    Args:
        url: The server.
        model: What is loaded in place of the models that pages name.
        folder: Where its files go, and what its shell blocks run in.
    """

    def __init__(self, url: str, model: Path, folder: Path) -> None:
        """Run nothing yet."""
        self._replaced = {**dict.fromkeys(ELSEWHERE, url), **dict.fromkeys(NAMES, str(model))}
        self._url = url
        self._folder = folder
        self._names: dict[str, Any] = {"__name__": "__main__"}

    def run(self, block: Block) -> None:
        """Run a block; raises what it raises, and CalledProcessError where a command fails."""
        code = self._here(block.code)
        if block.language in SHELLS:
            self._run_shell(code)
            return
        if block.before:
            self._run_python(self._here(block.before), 1, f"before_{block.line}.py")
        self._run_python(code, block.line, f"line_{block.line}.py")

    def _here(self, code: str) -> str:
        for named, here in self._replaced.items():
            code = code.replace(named, here)
        return code

    def _run_python(self, code: str, line: int, name: str) -> None:
        file = self._folder / name
        # A trace reads its source from the file; that is where the page has it.
        file.write_text("\n" * (line - 1) + code, encoding="utf-8")
        source = file.read_text(encoding="utf-8")
        compiled = compile(source, str(file), "exec", flags=PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        result = eval(compiled, self._names)
        if inspect.iscoroutine(result):
            asyncio.run(result)

    def _run_shell(self, code: str) -> None:
        environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "NNSIGHT_ENGINE_DATA_DIR": str(self._folder / "data"),
            "NNSIGHT_ENGINE_URL": self._url,  # the commands' default is where `make serve` serves
        }
        done = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", _PRELUDE + code],
            cwd=self._folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"


def run_page(path: Path, page: Page) -> None:
    """Run what is run of a page; an error says in which block it was."""
    for block in blocks(path):
        if block.language in RUN and not block.reason:
            try:
                page.run(block)
            except Exception as error:
                error.add_note(f"in the block at {block}")
                raise


if __name__ == "__main__":
    os.chdir(sys.argv[3])
    run_page(Path(sys.argv[1]), Page(ELSEWHERE[0], Path(sys.argv[2]), Path(sys.argv[3])))
