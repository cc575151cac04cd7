"""A system call filter for this process: calls that are not listed fail with ``EPERM``, in all threads.

It is a classic BPF program (``seccomp(2)``) on number, architecture and plain arguments; it cannot be
removed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from typing import Final

from nnsight_engine.sandbox.errors import SandboxUnavailableError
from nnsight_engine.sandbox.syscalls import MACHINES, SystemCallTable

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

_libc = ctypes.CDLL(None, use_errno=True)


def forbid_new_privileges() -> None:
    """Forbid programs that this process runs to gain privileges; a prerequisite of the filter."""
    check(_libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "prctl")


def check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def machine() -> SystemCallTable:
    """Return the system call numbers of this machine; SandboxUnavailableError unless it is a known Linux."""
    found = MACHINES.get(platform.machine()) if platform.system() == "Linux" else None
    if found is None:
        raise SandboxUnavailableError(
            f"code cannot be kept from system calls on {platform.system()} {platform.machine()}: the process "
            f"sandbox needs Linux on {' or '.join(MACHINES)}. Run the server in such a container, or with "
            "--sandbox off if all keys belong to people whom you trust with the engine"
        )
    return found


def install() -> None:
    """Install the filter for all threads of this process; OSError if the kernel refuses."""
    here = machine()
    program = _program(here)
    buffer = ctypes.create_string_buffer(program, len(program))
    head = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer)))
    forbid_new_privileges()
    result = _libc.syscall(
        ctypes.c_long(here.seccomp), ctypes.c_uint(_SET_FILTER), ctypes.c_uint(_ALL_THREADS), head
    )
    check(result, "seccomp")


def _program(here: SystemCallTable) -> bytes:
    """Return the filter: the architecture, the flags of ``mmap``, then one comparison for each listed call.

    Shared mappings could evade the counts of memory: pages stay allocated that the process has dropped.
    """
    count = len(here.allowed) + len(here.absent)
    assert count + 3 < _MAX_JUMP  # noqa: S101 - otherwise jumps would have to be chained
    # After the comparisons: fail, allow, absent.
    lines = [
        _line(_LOAD, k=_ARCHITECTURE_AT),
        _line(_JUMP_IF_EQUAL, 1, 0, here.audit),
        _line(_RETURN, k=_KILL),
        _line(_LOAD, k=_NUMBER_AT),
        _line(_JUMP_IF_AT_LEAST, count + 3, 0, here.limit),
        _line(_JUMP_IF_EQUAL, 0, 2, here.mmap),
        _line(_LOAD, k=_FOURTH_ARGUMENT_AT),
        _line(_JUMP_IF_ANY_BIT, count, count + 1, _MAP_SHARED),
    ]
    for at, number in enumerate(here.allowed):
        lines.append(_line(_JUMP_IF_EQUAL, count - at, 0, number))
    for at, number in enumerate(here.absent, len(here.allowed)):
        lines.append(_line(_JUMP_IF_EQUAL, count - at + 1, 0, number))
    lines += [
        _line(_RETURN, k=_FAIL | errno.EPERM),
        _line(_RETURN, k=_ALLOW),
        _line(_RETURN, k=_FAIL | errno.ENOSYS),
    ]
    return b"".join(lines)


def _line(code: int, jump_if: int = 0, jump_else: int = 0, k: int = 0) -> bytes:
    return struct.pack("=HBBI", code, jump_if, jump_else, k)


__all__ = ["check", "forbid_new_privileges", "install", "machine"]
