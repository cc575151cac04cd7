"""Confinement of a process before it runs untrusted code: user, namespaces, files, memory, system calls.

``isolate`` is for the zygote once it has loaded everything, ``confine`` for each sandbox; both are
irreversible.

System calls that are not listed fail with ``EPERM``, in all threads. The listed ones are for computing,
memory, waiting, and I/O on one descriptor. None opens, names or creates anything: no files, sockets,
processes, threads or keys. The numbers are the kernel's, from its tables for each architecture
(``asm/unistd_64.h``, ``asm-generic/unistd.h``). The filter is a classic BPF program (``seccomp(2)``) on
number, architecture and plain arguments, and cannot be removed.
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import os
import platform
import resource
import shutil
import signal
import struct
from pathlib import Path
from typing import Final

from nnsight_engine.sandbox.errors import SandboxUnavailableError


@dataclasses.dataclass(frozen=True, slots=True)
class SystemCallTable:
    """The numbers of one architecture.

    Attributes:
        audit: The kernel's identifier of the architecture (``linux/audit.h``).
        mmap: Allowed for private memory only.
        absent: Calls that fail with ``ENOSYS``, so that the C library falls back to others.
        limit: Calls from this number on belong to another ABI; none of them is allowed.
    """

    audit: int
    seccomp: int
    mmap: int
    allowed: tuple[int, ...]
    absent: tuple[int, ...]
    limit: int


_X86_64: Final = {
    "read": 0,
    "write": 1,
    "close": 3,
    "lseek": 8,
    "mprotect": 10,
    "munmap": 11,
    "brk": 12,
    "rt_sigaction": 13,
    "rt_sigprocmask": 14,
    "rt_sigreturn": 15,
    "sched_yield": 24,
    "mremap": 25,
    "madvise": 28,
    "nanosleep": 35,
    "getpid": 39,
    "exit": 60,
    "gettimeofday": 96,
    "getrusage": 98,
    "getuid": 102,
    "getgid": 104,
    "geteuid": 107,
    "getegid": 108,
    "sigaltstack": 131,
    "gettid": 186,
    "time": 201,
    "futex": 202,
    "sched_getaffinity": 204,
    "restart_syscall": 219,
    "clock_gettime": 228,
    "clock_getres": 229,
    "clock_nanosleep": 230,
    "exit_group": 231,
    "set_robust_list": 273,
    "getcpu": 309,
    "getrandom": 318,
    "membarrier": 324,
    "rseq": 334,
}
_AARCH64: Final = {
    "lseek": 62,
    "read": 63,
    "write": 64,
    "close": 57,
    "exit": 93,
    "exit_group": 94,
    "futex": 98,
    "set_robust_list": 99,
    "nanosleep": 101,
    "clock_gettime": 113,
    "clock_getres": 114,
    "clock_nanosleep": 115,
    "sched_getaffinity": 123,
    "sched_yield": 124,
    "restart_syscall": 128,
    "sigaltstack": 132,
    "rt_sigaction": 134,
    "rt_sigprocmask": 135,
    "rt_sigreturn": 139,
    "getrusage": 165,
    "getcpu": 168,
    "gettimeofday": 169,
    "getpid": 172,
    "getuid": 174,
    "geteuid": 175,
    "getgid": 176,
    "getegid": 177,
    "gettid": 178,
    "brk": 214,
    "munmap": 215,
    "mremap": 216,
    "mprotect": 226,
    "madvise": 233,
    "getrandom": 278,
    "membarrier": 283,
    "rseq": 293,
}
_CLONE3: Final = 435
_X32_BIT: Final = 0x40000000

MACHINES: Final = {
    "x86_64": SystemCallTable(0xC000003E, 317, 9, tuple(_X86_64.values()), (_CLONE3,), _X32_BIT),
    "aarch64": SystemCallTable(0xC00000B7, 277, 222, tuple(_AARCH64.values()), (_CLONE3,), _X32_BIT),
}
"""The known architectures, by ``platform.machine()``."""


_LOAD: Final = 0x20
_JUMP_IF_EQUAL: Final = 0x15
_JUMP_IF_AT_LEAST: Final = 0x35
_RETURN: Final = 0x06
_JUMP_IF_ANY_BIT: Final = 0x45
_NUMBER_AT, _ARCHITECTURE_AT, _FOURTH_ARGUMENT_AT = 0, 4, 40
_MAP_SHARED: Final = 1
_ALLOW: Final = 0x7FFF0000
_FAIL: Final = 0x00050000
_KILL: Final = 0x80000000
_SET_FILTER: Final = 1
_ALL_THREADS: Final = 1
_NO_NEW_PRIVILEGES: Final = 38
_MAX_JUMP: Final = 255
_LINE_BYTES: Final = 8

_libc = ctypes.CDLL(None, use_errno=True)


def forbid_new_privileges() -> None:
    """Forbid programs that this process runs to gain privileges; a prerequisite of the filter."""
    check_call(_libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "prctl")


def check_call(result: int, call_name: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call_name}: {os.strerror(number)}")


def machine() -> SystemCallTable:
    """Return the system call numbers of this machine; SandboxUnavailableError unless it is a known Linux."""
    machine_rules = MACHINES.get(platform.machine()) if platform.system() == "Linux" else None
    if machine_rules is None:
        raise SandboxUnavailableError(
            f"code cannot be kept from system calls on {platform.system()} {platform.machine()}: the process "
            f"sandbox needs Linux on {' or '.join(MACHINES)}. Run the server in such a container, or with "
            "--sandbox off if all keys belong to people whom you trust with the engine"
        )
    return machine_rules


def install_filter() -> None:
    """Install the filter for all threads of this process; OSError if the kernel refuses."""
    table = machine()
    program = _program(table)
    buffer = ctypes.create_string_buffer(program, len(program))
    head = ctypes.create_string_buffer(
        struct.pack("@HP", len(program) // _LINE_BYTES, ctypes.addressof(buffer))
    )
    forbid_new_privileges()
    result = _libc.syscall(
        ctypes.c_long(table.seccomp), ctypes.c_uint(_SET_FILTER), ctypes.c_uint(_ALL_THREADS), head
    )
    check_call(result, "seccomp")


def _program(table: SystemCallTable) -> bytes:
    """Return the filter: the architecture, the flags of ``mmap``, then one comparison for each listed call.

    Shared mappings could evade the counts of memory: pages stay allocated that the process has dropped.
    """
    count = len(table.allowed) + len(table.absent)
    assert count + 3 < _MAX_JUMP  # noqa: S101 - otherwise jumps would have to be chained
    # After the comparisons: fail, allow, absent.
    lines = [
        _line(_LOAD, k=_ARCHITECTURE_AT),
        _line(_JUMP_IF_EQUAL, 1, 0, table.audit),
        _line(_RETURN, k=_KILL),
        _line(_LOAD, k=_NUMBER_AT),
        _line(_JUMP_IF_AT_LEAST, count + 3, 0, table.limit),
        _line(_JUMP_IF_EQUAL, 0, 2, table.mmap),
        _line(_LOAD, k=_FOURTH_ARGUMENT_AT),
        _line(_JUMP_IF_ANY_BIT, count, count + 1, _MAP_SHARED),
    ]
    for index, number in enumerate(table.allowed):
        lines.append(_line(_JUMP_IF_EQUAL, count - index, 0, number))
    for index, number in enumerate(table.absent, len(table.allowed)):
        lines.append(_line(_JUMP_IF_EQUAL, count - index + 1, 0, number))
    lines += [
        _line(_RETURN, k=_FAIL | errno.EPERM),
        _line(_RETURN, k=_ALLOW),
        _line(_RETURN, k=_FAIL | errno.ENOSYS),
    ]
    return b"".join(lines)


def _line(code: int, jump_if: int = 0, jump_else: int = 0, k: int = 0) -> bytes:
    return struct.pack("=HBBI", code, jump_if, jump_else, k)


_NOBODY: Final = 65534
_NEW_USER: Final = 0x10000000
_NEW_NETWORK: Final = 0x40000000
_NEW_IPC: Final = 0x08000000
_NEW_MOUNTS: Final = 0x00020000
_NEW_NAMES: Final = 0x04000000
_DIE_WITH_PARENT: Final = 1
_NOT_DUMPABLE: Final = 4
_MAX_DESCRIPTORS: Final = 2**20
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")

_YIELDS: Final = 10
"""Nice value: the sandbox has a lower priority, as it may also compute while no request waits for it."""

_FIRST_TO_GO: Final = "1000"
"""OOM score adjustment: the kernel kills sandboxes before the engine."""


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
    """Enter new namespaces, as many as the kernel allows, and return the names of the others."""
    check_call(_libc.prctl(_NOT_DUMPABLE, 0, 0, 0, 0), "prctl")
    if _libc.unshare(_NEW_USER | _NEW_NETWORK | _NEW_IPC | _NEW_MOUNTS | _NEW_NAMES) == 0:
        return []
    if _libc.unshare(_NEW_USER | _NEW_NETWORK) == 0:
        return ["ipc", "mount", "uts"]
    return ["user", "network", "ipc", "mount", "uts"]


def _drop_user() -> None:
    """Become the user nobody, if this process is root's."""
    if os.geteuid() == 0:
        # The limit holds for all processes of the new user, those of other engines too.
        _, hard_limit = resource.getrlimit(resource.RLIMIT_NPROC)
        resource.setrlimit(resource.RLIMIT_NPROC, (hard_limit, hard_limit))
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
    check_call(_libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0), "prctl")


def keep_only(descriptors: set[int]) -> None:
    """Close all descriptors but these; point the standard ones to ``/dev/null``."""
    null_device = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(null_device, standard)
    previous = -1
    for descriptor in [*sorted(descriptors | {0, 1, 2}), _MAX_DESCRIPTORS]:
        if descriptor > previous + 1:  # closerange with an empty range would close all descriptors
            os.closerange(previous + 1, descriptor)
        previous = descriptor


def confine(share: ProcessLimits) -> None:
    """Limit memory to what this process has and its share more, then all else, and filter system calls."""
    num_pages, _, _, _, _, num_data_pages, _ = map(int, Path("/proc/self/statm").read_text().split())
    limits = {
        resource.RLIMIT_AS: num_pages * _PAGE_BYTES + share.memory_bytes,
        resource.RLIMIT_DATA: num_data_pages * _PAGE_BYTES + share.memory_bytes,
        resource.RLIMIT_CPU: share.cpu_s,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 0,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    for limit, maximum in limits.items():
        resource.setrlimit(limit, (maximum, maximum))
    os.nice(_YIELDS)
    install_filter()
