"""The system calls that a sandbox process may make: computing, memory, waiting, and I/O on one descriptor.

None of them opens, names or creates anything: no files, sockets, processes, threads or keys. The numbers are
the kernel's, from its tables for each architecture (``asm/unistd_64.h``, ``asm-generic/unistd.h``).
"""

from __future__ import annotations

import dataclasses
from typing import Final


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

__all__ = ["MACHINES", "SystemCallTable"]
