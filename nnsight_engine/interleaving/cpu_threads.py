from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch


def compute_on_one_thread() -> None:
    """Let kernels that the calling thread calls from now on compute on this thread alone.

    OpenMP keeps a team of threads for each calling thread. When all teams together exceed the cores, waiting
    threads no longer spin, and each kernel starts later. ``torch.set_num_threads`` cannot be used: it also
    sets the number of threads that call torch for the first time later.
    """
    torch.get_num_threads()  # torch sets the number at a thread's first call, which must not come later
    for set_num_threads in _setters():
        set_num_threads(1)


@cache
def _setters() -> tuple[Callable[[int], object], ...]:
    openmp = ctypes.CDLL(None).omp_set_num_threads  # torch loads its OpenMP for the whole process
    if not torch.backends.mkl.is_available():
        return (openmp,)
    mkl = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    return openmp, mkl.MKL_Set_Num_Threads_Local
