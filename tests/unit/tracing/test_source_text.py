"""Source is found wherever code may come from, and never guessed."""

from __future__ import annotations

import importlib.util
import os
import pty
import select
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FunctionType

import pytest

from nnsight_engine.tracing.source_text import SourceReader

# What every program below begins with: show() prints the line of its caller as the reader finds it.
PRELUDE = """\
import sys
from nnsight_engine.tracing.source_text import SourceReader
READER = SourceReader()
def show():
    frame = sys._getframe(1)
    text = READER.read(frame.f_code, frame.f_globals)
    print("FOUND", None if text is None else (text.lines[frame.f_lineno - 1].strip(), len(text.lines)))
"""
REPOSITORY = Path(__file__).parents[3]


def found_in(output: str) -> list[str]:
    """Return what the programs printed, one entry for each call of show()."""
    return [line.split("FOUND ", 1)[1].strip() for line in output.splitlines() if "FOUND " in line]


def run_python(*arguments: str, **options: object) -> list[str]:
    command = [sys.executable, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    answer = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        env=environment,
        **options,  # type: ignore[call-overload]
    )
    return found_in(answer.stdout)


def compiled_function(source: str, filename: str) -> FunctionType:
    namespace: dict[str, object] = {}
    exec(compile(source, filename, "exec"), namespace)  # the place where code comes from is the subject
    function = namespace["f"]
    assert isinstance(function, FunctionType)
    return function


def read(function: Callable[..., object], reader: SourceReader | None = None) -> tuple[str, ...] | None:
    assert isinstance(function, FunctionType)
    text = (reader or SourceReader()).read(function.__code__, function.__globals__)
    return None if text is None else tuple(text.lines)


def test_a_script_finds_itself_even_after_leaving_its_folder(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"{PRELUDE}import os\nos.chdir('/')\nshow()  # here\n", encoding="utf-8")
    assert run_python("script.py", cwd=tmp_path) == [repr(("show()  # here", 10))]


@pytest.mark.parametrize(
    "options", [["-c"], ["-X", "dev", "-Wignore", "-c"], ["-Bc"], ["-W", "ignore", "-OOc"]]
)
def test_a_program_on_the_command_line(options: list[str]) -> None:
    program = PRELUDE + "def f():\n    show()  # inner\nf()\nshow()  # outer\n"
    assert run_python(*options, program, "-c", "not this") == [
        repr(("show()  # inner", 11)),
        repr(("show()  # outer", 11)),
    ]


def test_text_run_by_exec_is_not_taken_for_the_program() -> None:
    program = PRELUDE + "exec('show()')\nexec(compile('\\n\\nshow()', '<stdin>', 'exec'))\n"
    assert run_python("-c", program) == ["None", "None"]


def test_a_script_on_stdin_is_read_again(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_bytes(
        f"# coding: latin-1\r\n{PRELUDE}def f():\r\n    show()  # ä\r\nf()\r\n".encode("latin-1")
    )
    with script.open("rb") as stdin:
        assert run_python(stdin=stdin) == [repr(("show()  # ä", 11))]


def test_a_piped_script_is_gone() -> None:
    assert run_python(input=PRELUDE + "show()\n") == ["None"]


def test_a_module_in_a_zip_archive(tmp_path: Path) -> None:
    archive = tmp_path / "packed.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        packed.writestr("packed_module.py", PRELUDE + "show()  # packed\n")
    program = f"import sys\nsys.path.insert(0, {str(archive)!r})\nimport packed_module"
    assert run_python("-c", program) == [repr(("show()  # packed", 8))]


def test_executed_text_that_is_not_registered_is_not_found() -> None:
    assert read(compiled_function("def f():\n    return 1\n", "<never registered>")) is None
    assert read(compiled_function("def f():\n    return 1\n", "<string>")) is None
    assert read(compiled_function("def f():\n    return 1\n", "/no/such/file.py")) is None


def test_a_file_that_no_longer_parses_is_no_source(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("def f(:\n", encoding="utf-8")
    assert read(compiled_function("def f():\n    return 1\n", str(path))) is None


def test_a_text_is_parsed_once_and_forgotten_when_many_others_came(tmp_path: Path) -> None:
    def code_of(number: int) -> CodeType:
        path = tmp_path / f"module_{number}.py"
        path.write_text("def f():\n    return 1\ndef g():\n    return 2\n", encoding="utf-8")
        return compile(path.read_text(encoding="utf-8"), str(path), "exec")

    first, second = code_of(1), code_of(2)
    inner = next(constant for constant in first.co_consts if isinstance(constant, CodeType))
    reader = SourceReader(max_texts=1, max_codes=1)
    before = reader.read(first, {})
    assert before is not None
    assert reader.read(inner, {}) is before
    assert reader.read(first, {}) is before
    reader.read(second, {})
    after = reader.read(first, {})
    assert after is not before
    assert after is not None
    assert after.lines == before.lines


def test_equal_code_of_two_files_is_distinguished(tmp_path: Path) -> None:
    reader = SourceReader()
    functions = []
    for name in ("one.py", "two.py"):
        (tmp_path / name).write_text(f"def f():\n    return 1\n# {name}\n", encoding="utf-8")
        functions.append(compiled_function("def f():\n    return 1\n", str(tmp_path / name)))
    assert functions[0].__code__ == functions[1].__code__
    assert [(read(function, reader) or ())[-1] for function in functions] == ["# one.py\n", "# two.py\n"]


def test_a_notebook_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    program = textwrap.dedent("""\
        from IPython.core.interactiveshell import InteractiveShell
        shell = InteractiveShell.instance()
        shell.run_cell(PRELUDE)
        shell.run_cell("x = 1\\n%time x\\nshow()  # in a cell")
        shell.run_cell("def later():\\n    show()  # in a function")
        shell.run_cell("later()")
        shell.run_cell("import asyncio\\nawait asyncio.sleep(0)\\nshow()  # after await")
        shell.run_cell("%%time\\nx = 1\\n\\nshow()  # timed\\nx")
        shell.run_cell("%%time\\ndef g(): show()  # timed function\\ng(); 1")
        shell.run_cell("from nnsight_engine.tracing.tracer import Tracer\\nfrom nnsight_engine import save")
        shell.run_cell("with Tracer():\\n    traced = save(['in a block'])\\nprint('FOUND', traced)")
        """)
    found = run_python("-c", f"PRELUDE = {PRELUDE!r}\n{program}")
    assert found == [
        repr(("show()  # in a cell", 3)),
        repr(("show()  # in a function", 2)),
        repr(("show()  # after await", 3)),
        repr(("show()  # timed", 4)),
        repr(("def g(): show()  # timed function", 2)),
        "['in a block']",
    ]


needs_readline = pytest.mark.skipif(
    importlib.util.find_spec("readline") is None, reason="this Python keeps no history of what is typed"
)


def type_at_prompt(lines: list[str], tmp_path: Path) -> list[str]:
    """Type lines into an interactive python on a terminal, each after its prompt; return what it found."""
    prelude = tmp_path / "prelude.py"
    prelude.write_text(PRELUDE, encoding="utf-8")
    # A history of its own, and the basic prompt also where there is a newer one.
    own = {"HOME": str(tmp_path), "PYTHON_BASIC_REPL": "1", "PYTHONPATH": str(REPOSITORY), "TERM": "dumb"}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSTARTUP"} | own
    terminal, other_side = pty.openpty()
    python = subprocess.Popen(
        [sys.executable, "-q"], stdin=other_side, stdout=other_side, stderr=other_side, env=environment
    )
    os.close(other_side)
    output = ""
    with python:
        try:
            for line in [f"exec(open({str(prelude)!r}).read())", *lines, "exit()"]:
                output += read_until_prompt(terminal)
                os.write(terminal, line.encode() + b"\n")
            output += read_until_prompt(terminal)
        finally:
            python.kill()
            os.close(terminal)
    return found_in(output)


def read_until_prompt(terminal: int) -> str:
    output = b""
    while not output.endswith((b">>> ", b"... ")) and select.select([terminal], [], [], 30.0)[0]:
        try:
            received = os.read(terminal, 4096)
        except OSError:  # Linux's way to say that the other side is closed
            break
        if not received:
            break
        output += received
    return output.decode()


@needs_readline
def test_statements_and_functions_typed_at_the_prompt(tmp_path: Path) -> None:
    typed = [
        "show()  # one line",
        "def earlier(n):",
        "    for i in range(n):",
        "        show()  # in a function",
        "",
        "if True:",
        "    x = 1",
        "    show()  # in a block",
        "else:",
        "    x = 2",
        "",
        "earlier(1)",
        "(lambda: show())()",
        "from nnsight_engine import save; from nnsight_engine.tracing.tracer import Tracer",
        "with Tracer():",
        "    traced = save(['in a block'])",
        "",
        "print('FOUND', traced)",
    ]
    assert type_at_prompt(typed, tmp_path) == [
        repr(("show()  # one line", 1)),
        repr(("show()  # in a block", 5)),
        repr(("show()  # in a function", 3)),
        repr(("(lambda: show())()", 1)),
        "['in a block']",
    ]


@needs_readline
def test_lines_that_the_history_leaves_out_are_put_back(tmp_path: Path) -> None:
    typed = [
        "with open('/dev/null'):",
        "    x = 1",
        "    x = 1",
        "    show()  # after a repeated line",
        "",
        "y = 2; show()",
        "y = 2; show()",
        "z = [",
        "",
        "    show(),  # after a blank line",
        "]",
        "from __future__ import annotations",
        "def annotated(x: 'int') -> None: show()",
        "",
        "annotated(1)",
    ]
    assert type_at_prompt(typed, tmp_path) == [
        repr(("show()  # after a repeated line", 4)),
        repr(("y = 2; show()", 1)),
        repr(("y = 2; show()", 1)),
        repr(("show(),  # after a blank line", 4)),
        repr(("def annotated(x: 'int') -> None: show()", 1)),
    ]


@needs_readline
def test_the_prompt_of_the_code_module(tmp_path: Path) -> None:
    typed = [
        "import readline, code",
        "code.interact(local=globals())",
        "if True:",
        "    show()  # nested",
        "",
    ]
    assert type_at_prompt(typed, tmp_path) == [repr(("show()  # nested", 2))]
