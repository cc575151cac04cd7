"""``python -m nnsight_engine.compat``: an unchanged script runs, as it would by itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import atexit, pickle, sys
import torch
import nnsight
from nnsight import NNsight
from nnsight.intervention.envoy import Envoy
import beside

class Picklable:
    pass

model = NNsight(torch.nn.Sequential(torch.nn.Linear(5, 10), torch.nn.Linear(10, 2)))

def broken():
    with model.trace(torch.ones(1, 5)):
        model[0].output[100].save()

with model.trace(torch.ones(1, 5)) as tracer:
    sizes = nnsight.save([])
    for layer in model:
        sizes.append(layer.output.shape[-1])

assert isinstance(model[0], Envoy)
assert type(pickle.loads(pickle.dumps(Picklable()))) is Picklable
atexit.register(lambda: print("at exit", sizes))
print(__name__, sys.argv, beside.NAME, sizes)
if "break" in sys.argv:
    broken()
sys.exit(7)
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    (folder / "beside.py").write_text("NAME = 'beside'\n")
    (folder / "script.py").write_text(SCRIPT)
    (folder / "small.py").write_text(
        "import nnsight, sys\nprint(__name__, *sys.argv[1:], nnsight.__name__)\n"
    )
    (folder / "wrong.py").write_text("x = = 1\n")
    return folder / "script.py"


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nnsight_engine.compat", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_script_runs_unchanged_with_its_arguments_and_its_exit_code(script: Path) -> None:
    done = run(script.parent.parent, f"{script.parent.name}/script.py", "--flag", "value")
    assert done.stdout.splitlines() == [
        f"__main__ ['{script.parent.name}/script.py', '--flag', 'value'] beside [10, 2]",
        "at exit [10, 2]",
    ]
    assert (done.returncode, done.stderr) == (7, "")


def test_error_shows_the_scripts_lines_and_no_others(script: Path) -> None:
    done = run(script.parent, "script.py", "break")
    assert done.returncode == 1
    assert done.stdout.endswith("at exit [10, 2]\n")
    lines = done.stderr.splitlines()
    assert [line.rpartition(", in ")[2] for line in lines if line.startswith("  File ")] == [
        "<module>",
        "broken",
        "broken",
    ]
    assert f'  File "{script}", line 15, in broken' in lines
    assert "    model[0].output[100].save()" in lines
    assert lines[-1].startswith("IndexError: index 100 is out of bounds")


def test_module_runs_too(script: Path) -> None:
    done = run(script.parent, "-m", "small", "-x")
    assert (done.stdout, done.returncode) == ("__main__ -x nnsight_engine\n", 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name a script to run, or a module after -m"),
        (("nothing.py",), "there is no script 'nothing.py'"),
    ],
)
def test_what_cannot_run_is_said(script: Path, arguments: tuple[str, ...], message: str) -> None:
    done = run(script.parent, *arguments)
    assert done.returncode == 2
    assert done.stderr.endswith(f"python -m nnsight_engine.compat: error: {message}\n")


def test_script_that_does_not_compile_is_shown_as_python_does(script: Path) -> None:
    done = run(script.parent, "wrong.py")
    path = script.parent / "wrong.py"
    assert done.stderr == f'  File "{path}", line 1\n    x = = 1\n        ^\nSyntaxError: invalid syntax\n'
    assert done.returncode == 1


def test_installed_original_is_respected(script: Path) -> None:
    (script.parent / "nnsight.py").write_text("")
    try:
        done = run(script.parent, "small.py")
        forced = run(script.parent, "--force", "small.py")
    finally:
        (script.parent / "nnsight.py").unlink()
    assert done.returncode == 2
    assert "nnsight itself is installed" in done.stderr
    assert forced.stdout == "__main__ nnsight_engine\n"


GUARDED = """
import multiprocessing
from nnsight.intervention.envoy import Envoy

class Mine:
    value = 3

def child(queue, mine):
    queue.put((mine.value, Envoy.__module__, __name__))

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue, Mine()))
    process.start()
    process.join()
    print(process.exitcode, queue.get() if process.exitcode == 0 else "")
"""
BARE = """
import multiprocessing
import nnsight
context = multiprocessing.get_context("spawn")
process = context.Process(target=print, args=("in the child",), kwargs={"flush": True})
process.start()
process.join()
print(process.exitcode, __name__, __file__)
"""


def test_processes_that_a_script_spawns_have_the_name_too(tmp_path: Path) -> None:
    (tmp_path / "guarded.py").write_text(GUARDED)
    done = run(tmp_path, "guarded.py")
    assert done.stdout == "0 (3, 'nnsight_engine.envoys.envoy', '__mp_main__')\n", done.stderr
    assert run(tmp_path, "-m", "guarded").stdout == done.stdout


def test_a_script_without_a_guard_is_not_run_by_the_processes_that_it_spawns(tmp_path: Path) -> None:
    (tmp_path / "bare.py").write_text(BARE)
    done = run(tmp_path, "bare.py")
    assert done.stdout == f"in the child\n0 __main__ {tmp_path / 'bare.py'}\n", done.stderr
