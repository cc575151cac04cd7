"""A process for vLLM's engine that is started before the engine is needed, to save startup time.

On a CPU vLLM spawns its engine's process: a new Python that imports torch and vLLM again, which adds seconds
to the parent's own imports. So the command line starts that process before its own imports, and both import
at the same time. When vLLM then starts its engine, it gets the waiting process, which is driven by the
protocol of ``multiprocessing`` for spawned processes (CPython's ``popen_spawn_posix``). If the waiting
process cannot replace a new one, a new one is spawned as usual.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import io
import itertools
import os
import resource
import signal
import sys
from collections.abc import Iterator, Mapping
from multiprocessing import context, popen_spawn_posix, reduction, resource_tracker, spawn, util
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

from nnsight_engine.core.environment import set_environment
from nnsight_engine.vllm_backend.processes import uninterrupted

_EXECUTABLE: Final = os.fsencode(sys.executable)
_PROGRAM: Final = (
    "import sys; sys.path[:] = {path!r}; "
    "from nnsight_engine.vllm_backend.early_imports import main; main({modules!r}, {pipe}, {tracker})"
)
_ENGINE_MODULES: Final = (
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "nnsight_engine.vllm_backend.worker",
    "nnsight_engine.vllm_backend.scheduler",
)
_INDUCTOR: Final = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_CPP_DYNAMIC_THREADS": "1"}
"""Variables that vLLM's CPU platform sets before it spawns the engine, and that torch reads on import."""
_PRELOAD: Final = "LD_PRELOAD"
_READ_AT_START: Final = (_PRELOAD, "OMP_", "GOMP_", "KMP_", "MKL_", "MALLOC_", "PYTHON", *_INDUCTOR)
"""Prefixes of variables that Python and native libraries read once, so that they cannot be changed later."""


class EarlyProcess:
    """A Python process that imports modules, then waits for its task; it exits when its parent has ended.

    Args:
        modules: The modules to import; those that cannot be imported are skipped.
        foreseen: Variables that will be set by the time the process is used, and are read at its start.

    Attributes:
        pid: The process id.
    """

    def __init__(self, modules: tuple[str, ...], foreseen: Mapping[str, str]) -> None:
        """Start the process."""
        tracker: int = resource_tracker.getfd()  # type: ignore[assignment]  # not None: started here
        self._sentinel, ends = os.pipe()
        told, self._tell = os.pipe()
        program = _PROGRAM.format(path=sys.path, modules=modules, pipe=told, tracker=tracker)
        flags = util._args_from_interpreter_flags()  # type: ignore[attr-defined]  # noqa: SLF001
        command = [sys.executable, *flags, "-c", program, "--multiprocessing-fork"]
        with uninterrupted(), _variables(foreseen):
            self._environment = dict(os.environ)
            self.pid: int = util.spawnv_passfds(_EXECUTABLE, command, [tracker, told, ends])
        self._has_ended = False
        os.close(told)
        os.close(ends)

    def can_stand_for_a_new_one(self) -> bool:
        """Return whether the process is alive and was started with the variables that a new one would get.

        Only variables that are read at the start (``_READ_AT_START``) are compared; ``_Environment`` sets all
        of them anew when the process gets its task.
        """
        self._has_ended = self._has_ended or os.waitpid(self.pid, os.WNOHANG)[0] != 0
        # To bind processes to NUMA nodes, vLLM has another executable start them.
        if self._has_ended or os.fsencode(spawn.get_executable()) != _EXECUTABLE:
            return False
        return _read_at_start(self._environment) == _read_at_start(os.environ)

    def become(self, popen: _Popen, told: bytes) -> None:
        """Make this the process that ``popen`` launches, and send it its task ``told``."""
        # A new process would inherit the resource limits, which the server raises after this one started.
        resource.prlimit(self.pid, resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE))
        popen.pid, popen.sentinel = self.pid, self._sentinel
        descriptors = (self._sentinel, self._tell)
        popen.finalizer = util.Finalize(popen, util.close_fds, descriptors)  # type: ignore[attr-defined]
        with open(self._tell, "wb", closefd=False) as pipe:
            pipe.write(told)

    def end(self) -> None:
        """Kill the process unused."""
        if not self._has_ended:  # else its pid may have been reused
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._sentinel)
        os.close(self._tell)


def begin() -> None:
    """Start the engine's process; call before vLLM is imported and after its variables are set."""
    global _waiting  # noqa: PLW0603 - at most one waiting process per process
    if _waiting is None:
        _waiting = EarlyProcess(_ENGINE_MODULES, {**_INDUCTOR, **_preloaded()})
        atexit.register(discard)


def discard() -> None:
    """Kill the waiting process, if there is one."""
    if _waiting is not None:
        _take().end()


@contextlib.contextmanager
def offered() -> Iterator[None]:
    """Make vLLM start its engine in the waiting process, if it would spawn one; discard it afterwards."""
    utils: Any = importlib.import_module("vllm.v1.engine.utils")
    of_vllm = utils.get_mp_context

    def get_mp_context() -> context.BaseContext:
        chosen: context.BaseContext = of_vllm()
        return EarlyContext() if chosen.get_start_method() == "spawn" else chosen

    utils.get_mp_context = get_mp_context
    try:
        yield
    finally:
        utils.get_mp_context = of_vllm
        discard()


class _Popen(popen_spawn_posix.Popen):
    """A launch in the waiting process, or otherwise in a new one."""

    _fds: list[int]
    finalizer: Any

    def message(self, process: BaseProcess) -> bytes:
        """Return the pickled data that a spawned process reads."""
        told = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            data = {**spawn.get_preparation_data(process.name), "environment": _Environment(os.environ)}
            reduction.dump(data, told)
            reduction.dump(process, told)
        finally:
            context.set_spawning_popen(None)
        return told.getvalue()

    def _launch(self, process_obj: BaseProcess) -> None:
        if _waiting is not None:
            told = self.message(process_obj)
            # The data may refer to open file descriptors, which only a new process can inherit.
            if _waiting.can_stand_for_a_new_one() and not self._fds:
                _take().become(self, told)
                return
            discard()
            self._fds.clear()
        super()._launch(process_obj)  # type: ignore[misc]


class _Process(context.SpawnProcess):
    @staticmethod
    def _Popen(process_obj: BaseProcess) -> _Popen:  # noqa: N802 - multiprocessing's name
        return _Popen(process_obj)


class EarlyContext(context.SpawnContext):
    """``multiprocessing``'s spawn context, whose first process is the waiting one."""

    Process = _Process


class _Environment:
    """Environment variables that are set when this is unpickled; the waiting process has outdated ones."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = dict(variables)

    def __reduce__(self) -> tuple[Any, ...]:
        return set_environment, (self._variables,)


def _preloaded() -> dict[str, str]:
    """Return the ``LD_PRELOAD`` that vLLM's CPU platform is going to set: torch's OpenMP and vLLM's malloc.

    ``can_stand_for_a_new_one`` verifies the guess before the process is used.
    """
    given = os.environ.get(_PRELOAD, "")
    torch, vllm = _folder_of("torch"), _folder_of("vllm")
    found = [given] if given else []
    if not any(name in given for name in ("libomp", "libgomp", "libiomp")):
        found += _first([(torch.parent / "torch.libs", "libgomp*.so*"), (torch / "lib", "libgomp*.so*")])
    if "libtcmalloc" not in given:
        own = [(vllm / "libs", f"libtcmalloc{kind}") for kind in ("_minimal*.so*", ".so*")]
        found = _first(own) + found
    return {_PRELOAD: ":".join(found)} if found else {}


def _folder_of(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    return Path(spec.origin).parent


def _first(places: list[tuple[Path, str]]) -> list[str]:
    found = (str(file) for folder, pattern in places for file in folder.glob(pattern))
    return list(itertools.islice(found, 1))


def _read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_READ_AT_START)}


@contextlib.contextmanager
def _variables(chosen: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in chosen}
    os.environ.update(chosen)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _take() -> EarlyProcess:
    global _waiting
    if _waiting is None:
        raise LookupError("no process waits")
    early, _waiting = _waiting, None
    return early


_waiting: EarlyProcess | None = None

__all__ = ["EarlyContext", "EarlyProcess", "begin", "discard", "offered"]
