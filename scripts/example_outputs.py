"""Runs the examples and the notebooks, and stores what they print and draw beside them.

    .venv/bin/python scripts/example_outputs.py                              # those that need no server
    .venv/bin/python scripts/example_outputs.py --url http://127.0.0.1:8000  # those of a server too

``examples/OUTPUT.md`` and ``examples/pictures/`` have the output of scripts, notebooks their own. Names of
examples or notebooks as arguments run these alone and keep what the others have.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import nbformat
from nbclient import NotebookClient

EXAMPLES: Final = Path(__file__).resolve().parents[1] / "examples"
OUTPUT: Final = EXAMPLES / "OUTPUT.md"
HEAD: Final = """\
# Output of the examples

What each example prints, and draws with `--save`, with the bundled model. This page is made by
`scripts/example_outputs.py`.
"""
LOCAL: Final = {
    "logit_lens": True,
    "causal_tracing": True,
    "activation_patching": True,
    "attribution_patching": True,
    "induction_heads": True,
    "train_probe": True,
    "sae_features": False,
    "ablate_refusal": False,
}
"""The examples that need no server, and whether they draw."""
SERVED: Final = ("steer_sentiment",)
_SECTION: Final = re.compile(r"^## (\w+)\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)


def run_script(name: str, *, draws: bool, arguments: tuple[str, ...] = ()) -> str:
    """Run an example, and return its section."""
    picture = f"pictures/{name}.png"
    saving = ("--save", picture) if draws else ()
    environment = {**os.environ, "COLUMNS": "100", "TERM": "dumb", "PYTHONPATH": str(EXAMPLES.parent)}
    command = [sys.executable, f"{name}.py", *arguments, *saving]
    done = subprocess.run(  # noqa: S603 - our own examples
        command, cwd=EXAMPLES, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    printed = "\n".join(line.rstrip() for line in done.stdout.splitlines() if not line.startswith("Drawn to"))
    drawn = f"\n![The figure that {name}.py draws]({picture})\n" if draws else ""
    return f"## {name}\n\n```text\n{printed.strip(chr(10))}\n```\n{drawn}"


def run_notebook(path: Path) -> None:
    """Run a notebook, and store its outputs in it."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook,
        record_timing=False,
        coalesce_streams=True,
        timeout=900,
        resources={"metadata": {"path": str(path.parent)}},
    ).execute()
    notebook.metadata.language_info = {"name": "python"}
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":  # without warnings and progress, which are those of this machine
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    path.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description="Store what the examples print and draw.")
    parser.add_argument("names", nargs="*", help="of examples or notebooks; default: all")
    parser.add_argument("--url", help="a server of the bundled model, for the examples that need one")
    options = parser.parse_args()
    notebooks = {f"{path.stem}.ipynb": path for path in sorted(EXAMPLES.glob("notebooks/*.ipynb"))}
    names = options.names or [*LOCAL, *(SERVED if options.url else ()), *notebooks]
    before = OUTPUT.read_text(encoding="utf-8") if OUTPUT.exists() else ""
    sections = {found[1]: found[0] for found in _SECTION.finditer(before)}
    (EXAMPLES / "pictures").mkdir(exist_ok=True)
    for name in names:
        if name in notebooks:
            run_notebook(notebooks[name])
        elif name in LOCAL:
            sections[name] = run_script(name, draws=LOCAL[name])
        else:
            sections[name] = run_script(name, draws=False, arguments=("--base-url", options.url))
    ordered = [sections[name].strip() for name in (*LOCAL, *SERVED) if name in sections]
    OUTPUT.write_text("\n\n".join([HEAD.strip(), *ordered]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
