"""The notebooks run from top to bottom in a kernel of their own, and are committed with their outputs."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import nbformat
import pytest
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

NOTEBOOKS: Final = Path(__file__).resolve().parents[2] / "examples" / "notebooks"
TIMEOUT_S: Final = 180
MAX_BYTES: Final = 200_000
RUN: Final = "run .venv/bin/python scripts/example_outputs.py NAME.ipynb"


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where kernels have their files, and talk: not the user's home, and short, as sockets need it."""
    with tempfile.TemporaryDirectory(prefix="nb") as folder:
        for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR"):
            monkeypatch.setenv(name, f"{folder}/{name[:3]}")
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        yield Path(folder)


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_is_committed_as_it_is_written_with_the_outputs_of_a_whole_run(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    notebook = nbformat.reads(text, as_version=4)
    nbformat.validate(notebook)
    assert nbformat.writes(notebook) + "\n" == text, f"{path.name} is not as nbformat writes it"
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert notebook.metadata.language_info == {"name": "python"}  # not which Python somebody had
    assert not any(cell.metadata for cell in notebook.cells)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [*range(1, len(code) + 1)], RUN
    for cell in code:
        shown = json.dumps([{**output, "data": without_pictures(output)} for output in cell.outputs])
        assert not re.search(r"(?<![\w.])/\w+/\w+", shown), f"a path of the machine that ran it: {shown}"
    assert len(text) < MAX_BYTES


def without_pictures(output: Any) -> dict[str, Any]:
    return {kind: data for kind, data in output.get("data", {}).items() if not kind.startswith("image/")}


def kinds_of(cells: list[Any]) -> list[set[tuple[str, ...]]]:
    """Return what each cell of code shows, without its content."""
    return [
        {
            (output.output_type, *sorted(output.get("data", {})))
            for output in cell.outputs
            if output.get("name") != "stderr"
        }
        for cell in cells
        if cell.cell_type == "code"
    ]


@pytest.mark.e2e
@pytest.mark.heavy
def test_the_lens_ends_in_paris_and_is_drawn(runtime: Path) -> None:
    cells = executed("logit_lens", runtime)
    assert "the model says ' Paris'" in printed(cells)
    assert len(pictures(cells)) == 2
    ranks = next(text for text in printed(cells).splitlines() if text.startswith("["))
    assert ranks.endswith(" 1]")


@pytest.mark.e2e
@pytest.mark.heavy
def test_patching_shows_where_the_difference_moves(runtime: Path) -> None:
    cells = executed("patching", runtime)
    assert len(pictures(cells)) == 1
    rows = {
        int(line.split()[0]): [float(value) for value in line.split("[")[1].rstrip("]").split(",")]
        for line in printed(cells).splitlines()
        if line[:2].isdigit()
    }
    assert rows[20][3] > 0.9 > 0.1 > rows[20][4]  # at the country's name, not at the end
    assert rows[24][4] > 0.9 > 0.1 > rows[24][3]


@pytest.mark.e2e
@pytest.mark.heavy
def test_steering_moves_the_text_both_ways(runtime: Path) -> None:
    cells = executed("steering", runtime)
    assert len(pictures(cells)) == 1
    lines = [line for line in printed(cells).splitlines() if " mean " in line]
    down, still, up = (float(line.rsplit(" ", 1)[1]) for line in lines)
    assert down < still < up
    assert len({line.split(" ", 1)[1].rsplit(" mean ", 1)[0] for line in lines}) == 3


def executed(name: str, runtime: Path) -> list[Any]:
    """Run a notebook where it lies, by a kernel that listens on no port, and return its cells."""
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    manager = AsyncKernelManager(transport="ipc", kernel_name="python3", ip=str(runtime / "kernel"))
    NotebookClient(
        notebook, km=manager, timeout=TIMEOUT_S, resources={"metadata": {"path": str(NOTEBOOKS)}}
    ).execute(cleanup_kc=True)  # else a kernel that we made lives on
    cells: list[Any] = notebook.cells
    stored: list[Any] = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4).cells
    assert kinds_of(cells) == kinds_of(stored), RUN
    return cells


def printed(cells: list[Any]) -> str:
    outputs = (output for cell in cells for output in cell.get("outputs", []))
    return "".join(output.text for output in outputs if output.get("name") == "stdout")


def pictures(cells: list[Any]) -> list[str]:
    outputs = (output for cell in cells for output in cell.get("outputs", []))
    return [data["image/png"] for output in outputs if "image/png" in (data := output.get("data", {}))]
