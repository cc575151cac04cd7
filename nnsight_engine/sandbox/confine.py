"""Confinement of a process before it runs untrusted code: user, namespaces, files, memory, system calls.

``isolate`` is for the zygote once it has loaded everything, ``confine`` for each sandbox; both are
irreversible.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import resource
import shutil
import signal
from pathlib import Path
from typing import Final

from nnsight_engine.sandbox import seccomp

_NOBODY: Final = 65534
_NEW_USER: Final = 0x10000000
_NEW_NETWORK: Final = 0x40000000
_NEW_IPC: Final = 0x08000000
_NEW_MOUNTS: Final = 0x00020000
_NEW_NAMES: Final = 0x04000000
_DIE_WITH_PARENT: Final = 1
_NOT_DUMPABLE: Final = 4
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")

_YIELDS: Final = 10
"""Nice value: the sandbox has a lower priority, as it may also compute while no request waits for it."""

_FIRST_TO_GO: Final = "1000"
"""OOM score adjustment: the kernel kills sandboxes before the engine."""

_libc = ctypes.CDLL(None, use_errno=True)


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessLimits:
    """Limits of one sandbox process: memory beyond its initial size, and CPU seconds of its life."""

    memory_bytes: int
    cpu_s: int


def isolate(folder: str) -> list[str]:
    """Drop this process's user, environment, folder and, where the kernel allows it, its namespaces.

    ``folder`` becomes the working directory and is removed. Return the namespaces that were denied.
    """
    os.environ.clear()
    os.chdir(folder)
    shutil.rmtree(folder, ignore_errors=True)  # an empty working directory without a name remains
    Path("/proc/self/oom_score_adj").write_text(_FIRST_TO_GO)
    _drop_user()
    os.umask(0o777)
    return _leave_namespaces()


def _leave_namespaces() -> list[str]:
    seccomp.check(_libc.prctl(_NOT_DUMPABLE, 0, 0, 0, 0), "prctl")
    if _libc.unshare(_NEW_USER | _NEW_NETWORK | _NEW_IPC | _NEW_MOUNTS | _NEW_NAMES) == 0:
        return []
    if _libc.unshare(_NEW_USER | _NEW_NETWORK) == 0:
        return ["ipc", "mount", "uts"]
    return ["user", "network", "ipc", "mount", "uts"]


def _drop_user() -> None:
    if os.geteuid() == 0:
        # The limit holds for all processes of the new user, those of other engines too.
        _, most = resource.getrlimit(resource.RLIMIT_NPROC)
        resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)


def missing_namespaces() -> list[str]:
    """Return the namespaces that sandboxes would lack here, see ``isolate``; tried in a child."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _drop_user()
            os.write(writing, " ".join(_leave_namespaces()).encode())
            os._exit(0)
        finally:
            os._exit(1)  # a child must never return into its parent's code
    os.close(writing)
    with os.fdopen(reading) as report:
        missing = report.read().split()
    _, status = os.waitpid(child, 0)
    return missing if os.waitstatus_to_exitcode(status) == 0 else ["user", "network", "ipc", "mount", "uts"]


def die_with_parent() -> None:
    seccomp.check(_libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0), "prctl")


def keep_only(descriptors: set[int]) -> None:
    """Close all descriptors but these; point the standard ones to ``/dev/null``."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(nowhere, standard)
    last = -1
    for kept in [*sorted(descriptors | {0, 1, 2}), 1 << 20]:
        if kept > last + 1:  # closerange with an empty range would close all descriptors
            os.closerange(last + 1, kept)
        last = kept


def confine(share: ProcessLimits) -> None:
    total, _, _, _, _, data, _ = map(int, Path("/proc/self/statm").read_text().split())
    limits = {
        resource.RLIMIT_AS: total * _PAGE_BYTES + share.memory_bytes,
        resource.RLIMIT_DATA: data * _PAGE_BYTES + share.memory_bytes,
        resource.RLIMIT_CPU: share.cpu_s,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 0,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    for limit, most in limits.items():
        resource.setrlimit(limit, (most, most))
    os.nice(_YIELDS)
    seccomp.install()


__all__ = [
    "ProcessLimits",
    "confine",
    "die_with_parent",
    "isolate",
    "keep_only",
    "missing_namespaces",
]
