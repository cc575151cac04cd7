"""A process for the engine that is begun before there is anything for it to do.

On a CPU vLLM spawns its engine's process: a new Python, which imports torch and vLLM once more, seconds that
come on top of the parent's. So the command line begins that process before it imports them itself, and both
import at the same time. When vLLM then starts its engine it is given the one that waits, in the way in which
``multiprocessing`` (CPython's ``popen_spawn_posix``) speaks to a spawned one; where that cannot stand for a
new one, a new one is spawned as ever.
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
"""What vLLM's platform for CPUs sets before it spawns the engine, and torch reads when it is imported."""
_PRELOAD: Final = "LD_PRELOAD"
_READ_AT_START: Final = (_PRELOAD, "OMP_", "GOMP_", "KMP_", "MKL_", "MALLOC_", "PYTHON", *_INDUCTOR)
"""Beginnings of variables that native libraries and Python read once: a process cannot be told later."""


class EarlyProcess:
    """A Python that imports, then waits to be told what it is for; it ends where nobody is left to tell it.

    Args:
        modules: What it imports; what cannot be imported is left out.
        foreseen: Variables that will have been set by the time it is used, and are read when it starts.

    Attributes:
        pid: Its number.
    """

    def __init__(self, modules: tuple[str, ...], foreseen: Mapping[str, str]) -> None:
        """Begin it."""
        tracker: int = resource_tracker.getfd()  # type: ignore[assignment]  # it is ensured to run
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
        """Tell whether it lives, and a process that is started now would read the same when it starts."""
        self._has_ended = self._has_ended or os.waitpid(self.pid, os.WNOHANG)[0] != 0
        # Where it binds processes to NUMA nodes, vLLM has another program start them.
        if self._has_ended or os.fsencode(spawn.get_executable()) != _EXECUTABLE:
            return False
        return _read_at_start(self._environment) == _read_at_start(os.environ)

    def become(self, popen: _Popen, told: bytes) -> None:
        """Be the process that ``popen`` launches, and run what it is ``told``."""
        # Limits are inherited too, and a server raises its own.
        resource.prlimit(self.pid, resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE))
        popen.pid, popen.sentinel = self.pid, self._sentinel
        descriptors = (self._sentinel, self._tell)
        popen.finalizer = util.Finalize(popen, util.close_fds, descriptors)  # type: ignore[attr-defined]
        with open(self._tell, "wb", closefd=False) as pipe:
            pipe.write(told)

    def end(self) -> None:
        """End it without having used it."""
        if not self._has_ended:  # else its number may be another's by now
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._sentinel)
        os.close(self._tell)


def begin() -> None:
    """Begin the engine's process; before vLLM is imported, and after its variables are set."""
    global _waiting  # noqa: PLW0603 - a process has one engine at a time, and one process for it
    if _waiting is None:
        _waiting = EarlyProcess(_ENGINE_MODULES, {**_INDUCTOR, **_preloaded()})
        atexit.register(discard)


def discard() -> None:
    """End the process that waits, if there is one."""
    if _waiting is not None:
        _take().end()


@contextlib.contextmanager
def offered() -> Iterator[None]:
    """Have vLLM start its engine in the process that waits, if it would spawn one; it is gone afterwards."""
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
    """A launch in the process that waits, or else in a new one."""

    _fds: list[int]
    finalizer: Any

    def message(self, process: BaseProcess) -> bytes:
        """Return what a spawned process is told."""
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
            # What it is told may name open files, which only a new process can be given.
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
    """``multiprocessing``'s context of spawned processes, of which the first is the one that waits."""

    Process = _Process


class _Environment:
    """Variables that are set where this is unpickled: a process that waits has those of an earlier time."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = dict(variables)

    def __reduce__(self) -> tuple[Any, ...]:
        return set_environment, (self._variables,)


def _preloaded() -> dict[str, str]:
    """Return what vLLM's platform for CPUs will have loaded before all else: torch's OpenMP, its own malloc.

    That it does is looked at where the process is used.
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
