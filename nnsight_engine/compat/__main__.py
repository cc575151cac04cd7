"""``python -m nnsight_engine.compat script.py args...``: run a script written for nnsight with this library.

The script runs as under ``python script.py``: it is ``__main__``, ``sys.argv`` is its own, modules in its
folder can be imported, a traceback shows only the script's frames, and the exit code is the script's.
"""

from __future__ import annotations

import argparse
import os
import re
import runpy
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import ModuleType

from nnsight_engine.compat import children
from nnsight_engine.compat.finder import OriginalInstalledError, install
from nnsight_engine.core.config import CONFIG
from nnsight_engine.tracing.frames import hide_our_frames

_INTERRUPTED = 130
_GUARD = re.compile(rb"__name__\s*==\s*['\"]__main__['\"]")
"""Without it, a process that the script spawns (vLLM's engine on a CPU) would run the script as well."""


def main(arguments: list[str]) -> int:
    """Install the hooks, and run the named script or module; return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m nnsight_engine.compat", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--force", action="store_true", help="even though nnsight itself is installed")
    parser.add_argument("-m", action="store_true", dest="is_module", help="the program is a module")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="a script or module, and its arguments")
    options = parser.parse_args(arguments)
    if not options.program:
        parser.error("name a script to run, or a module after -m")
    try:
        install(force=options.force)
    except OriginalInstalledError as error:
        parser.error(f"{error} (--force)")
    sys.path.append(os.path.dirname(children.__file__))
    name, sys.argv = options.program[0], options.program
    if options.is_module:
        return _run_and_report(lambda: runpy.run_module(name, run_name="__main__", alter_sys=True))
    if not os.path.isfile(name):
        parser.error(f"there is no script {name!r}")
    return _run_and_report(lambda: _run_script(name))


def _run_script(name: str) -> None:
    """Run a file as ``__main__``, like the interpreter does; spawned processes run it if it has a guard."""
    path = os.path.abspath(name)
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(path)
    loader = SourceFileLoader("__main__", path)
    script = ModuleType("__main__")
    script.__file__, script.__loader__ = path, loader
    sys.modules["__main__"] = script  # kept: threads and atexit handlers outlive the script
    source = loader.get_data(path)
    if _GUARD.search(source) is None:
        script.__spec__ = ModuleSpec(f"{children.__name__}.__main__", loader)  # spawned processes skip it
    code = loader.source_to_code(source, path)
    exec(code, script.__dict__)  # noqa: S102 - running the script is the purpose


def _run_and_report(run: Callable[[], object]) -> int:
    """Run a program and return its exit code; an error is printed without our and the launcher's frames."""
    try:
        run()
    except Exception as error:  # noqa: BLE001 - any error that the program did not handle
        failed: BaseException = error
        code = 1
    except KeyboardInterrupt as error:
        failed, code = error, _INTERRUPTED
    else:
        return 0
    traceback = failed.__traceback__
    while traceback is not None and _is_launcher(traceback.tb_frame.f_code.co_filename):
        traceback = traceback.tb_next
    if not CONFIG.APP.DEBUG:
        traceback = hide_our_frames(traceback)
    sys.excepthook(type(failed), failed.with_traceback(traceback), traceback)
    return code


def _is_launcher(filename: str) -> bool:
    return filename in {__file__, runpy.__file__} or filename.startswith("<frozen ")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
