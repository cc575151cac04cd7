"""Ways past Python: system calls, other processes, messages to the engine, and endless loops."""

NATIVE = {
    "environment": "import os\ngot = dict(os.environ)\nassert 'NNSIGHT_ENGINE_TEST_SECRET' in got",
    "environment-of-the-start": """
import ctypes
at = ctypes.c_void_p.in_dll(ctypes.CDLL(None), 'program_invocation_name').value
got = []
while not got or b'VLLM_NO_USAGE_STATS' not in got[-1]:
    got.append(ctypes.string_at(at))
    at += len(got[-1]) + 1
assert any(b'NNSIGHT_ENGINE_TEST_' in one for one in got)
""",
    "every-object": "import gc\ngot = [one for one in gc.get_objects() if '_'.join(['NNSIGHT_ENGINE_TEST', 'SECRET']) in str(one)[:10_000]]\nassert got",
    "every-descriptor": """
import os
got = []
for number in range(1 << 12):
    try: got.append(os.read(number, 64)) if number != side._descriptor else None
    except OSError: pass
assert any(got)
""",
    "delete-everything": "import shutil\nshutil.rmtree('/', ignore_errors=True)\nshutil.rmtree('/')",
    "fork-bomb": """
import ctypes, os
for _ in range(1000):
    assert ctypes.CDLL(None).fork() < 0
while True: os.fork()
""",
    "open": "got = open(canary).read()",
    "line-of-a-file": "import linecache\ngot = linecache.getline(canary, 1)\nassert got",
    "traceback-of-a-file": """
import traceback
try:
    exec(compile('1 / 0', canary, 'exec'))
except ZeroDivisionError as error:
    got = traceback.extract_tb(error.__traceback__)[-1].line
assert got
""",
    "open-libc": "import ctypes\ngot = ctypes.CDLL(None).open(canary.encode(), 1)\nassert got >= 0",
    "open-by-number": "import ctypes\ngot = ctypes.CDLL(None).syscall(2, canary.encode(), 1)\nassert got >= 0",
    "openat2": "import ctypes\ngot = ctypes.CDLL(None).syscall(437, -100, canary.encode(), b'\\0' * 24, 24)\nassert got >= 0",
    "io-uring": "import ctypes\ngot = ctypes.CDLL(None).syscall(425, 4, b'\\0' * 120)\nassert got >= 0",
    "x32": "import ctypes\ngot = ctypes.CDLL(None).syscall(0x40000002, canary.encode(), 1)\nassert got >= 0",
    "list-root": "import os\ngot = os.listdir('/')",
    "unlink": "import os\nos.unlink(canary)",
    "truncate": "import os\nos.truncate(canary, 0)",
    "rename": "import os\nos.rename(canary, canary + '2')",
    "symlink": "import os\nos.symlink(canary, 'here')",
    "chmod": "import os\nos.chmod(canary, 0o777)",
    "stat": "import os\ngot = os.stat(canary)",
    "parents-environment": "import os\ngot = open(f'/proc/{os.getppid()}/environ', 'rb').read()",
    "own-memory": "got = open('/proc/self/mem', 'rb').read(8)",
    "torch-save": "torch.save(x, canary)",
    "torch-load": "got = torch.load(canary)",
    "torch-from-file": "got = torch.from_file(canary, size=4, dtype=torch.uint8)",
    "numpy-tofile": "x.numpy().tofile(canary)",
    "numpy-memmap": "import numpy\ngot = numpy.memmap(canary, mode='r+', dtype='u1')",
    "extension": "from torch.utils.cpp_extension import load_inline\nload_inline('a', 'int a() { return 1; }', functions=['a'])",
    "socket": "import socket\nsocket.create_connection(('127.0.0.1', port))",
    "socket-pair": "import socket\nsocket.socketpair()",
    "libc-socket": "import ctypes\ngot = ctypes.CDLL(None).socket(2, 1, 0)\nassert got >= 0",
    "fork": "import os\ngot = os.fork()",
    "vfork": "import ctypes\ngot = ctypes.CDLL(None).vfork()\nassert got >= 0",
    "clone3": "import ctypes\ngot = ctypes.CDLL(None).syscall(435, b'\\0' * 88, 88)\nassert got >= 0",
    "spawn": "import subprocess\nsubprocess.run(['touch', canary])",
    "system": "import os\ngot = os.system('touch ' + canary)\nassert got == 0",
    "exec": "import os\nos.execv('/bin/sh', ['sh'])",
    "thread": "import threading\nthreading.Thread(target=print).start()",
    "kill-parent": "import os\nos.kill(os.getppid(), 9)",
    "kill-all": "import os\nos.kill(-1, 9)",
    "shared-mapping": "import mmap\ngot = mmap.mmap(-1, 2**20)",
    "shared-mapping-by-number": """
import ctypes, platform
number = {'x86_64': 9, 'aarch64': 222}[platform.machine()]
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
for flags in (0x21, 0x23):
    got = libc.syscall(number, None, ctypes.c_long(2**20), 3, flags, -1, ctypes.c_long(0))
    assert got == -1 and ctypes.get_errno() == 1, got
    got = libc.syscall(number, None, ctypes.c_long(2**20), 3, ctypes.c_long(2**32 | flags), -1, ctypes.c_long(0))
    assert got == -1 and ctypes.get_errno() == 1, got
raise PermissionError
""",
    "ptrace": "import ctypes, os\ngot = ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0)\nassert got >= 0",
    "process-vm": "import ctypes, os\ngot = ctypes.CDLL(None).syscall(310, os.getppid(), 0, 0, 0, 0, 0)\nassert got >= 0",
    "pidfd": "import ctypes, os\ngot = ctypes.CDLL(None).syscall(434, os.getppid(), 0)\nassert got >= 0",
    "set-user": "import os\nos.setuid(0)",
    "unshare": "import ctypes\ngot = ctypes.CDLL(None).unshare(0x10000000)\nassert got >= 0",
    "mount": "import ctypes\ngot = ctypes.CDLL(None).mount(b'none', b'/', b'tmpfs', 0, None)\nassert got >= 0",
    "bpf": "import ctypes\ngot = ctypes.CDLL(None).syscall(321, 0, 0, 0)\nassert got >= 0",
    "keys": "import ctypes\ngot = ctypes.CDLL(None).syscall(248, b'user', b'a', b'b', 1, -3)\nassert got >= 0",
    "seccomp-again": "import ctypes\ngot = ctypes.CDLL(None).syscall(317, 1, 0, 0)\nassert got >= 0",
    "raise-limits": "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))",
    "memfd": "import os\nos.memfd_create('a')",
    "pipe": "import os\nos.pipe()",
    "shared-memory": "from multiprocessing import shared_memory\nshared_memory.SharedMemory(create=True, size=8)",
    "system-v": "import ctypes\ngot = ctypes.CDLL(None).shmget(0, 4096, 0o1666)\nassert got >= 0",
    "affinity": "import os\nos.sched_setaffinity(0, {0})",
    "nice": "import os\nos.nice(-5)",
    "memory": "keep = []\nwhile True:\n    keep.append(torch.ones(10_000_000))",
    "memory-python": "keep = [bytearray(2**24) for _ in range(1000)]",
    "huge-tensor": "got = torch.ones(10**11)",
}
"""Native roads, each of which ends with an error."""

DEADLY = {
    "loop": "while True: pass",
    "loop-deaf": "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    "loop-inside-sum": "sum(range(10**12))",
    "loop-inside-a-regular-expression": "import re\nre.match('(a+)+$', 'a' * 64 + 'b')",
    "loop-inside-a-number": "got = 10**10**9",
    "flood": "import os\nwhile True: os.write(side._descriptor, b'\\xff' * 65536)",
    "loop-inside-torch": "a = torch.ones(3000, 3000)\nwhile True: a @ a",
    "sleep": "import time\ntime.sleep(1000)",
    "deaf-to-signals": "import signal\nfor n in range(1, 32):\n    try: signal.signal(n, signal.SIG_IGN)\n    except OSError: pass\nwhile True: pass",
    "segfault": "import ctypes\nctypes.string_at(0)",
    "abort": "import os\nos.abort()",
    "deep": "import sys\nsys.setrecursionlimit(10**9)\nf = lambda: f()\nf()",
    "exit": "import os\nos._exit(0)",
    "garbage": "import os\nos.write(side._descriptor, b'\\xff' * 64)",
    "no-answer-but-a-long-one": "import os, struct\nos.write(side._descriptor, struct.pack('<QQ', 2**63, 0))",
    "more-than-there-is": "import os, struct\nos.write(side._descriptor, struct.pack('<QQ', 0, 2**40))",
    "half-an-answer": "import os, struct, time\nos.write(side._descriptor, struct.pack('<QQ', 100, 0) + b'a')\ntime.sleep(1000)",
}
"""What ends the process, or has it ended."""
