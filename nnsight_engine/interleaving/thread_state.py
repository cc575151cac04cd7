"""State of a thread that the model and each block must have for themselves: torch's modes, random numbers.

A block may wait within its own ``no_grad``, ``inference_mode`` or ``autocast``, and run while the model is
within some of them. Grad mode differs often and is swapped on a fast path; the other two are seldom on.

Where each of several ranks samples for itself, torch's generators must stay in step whatever a block draws.
So a block has seeds of its own, and the generators' states, and NumPy's, are swapped before it runs and when
it hands over. Python's ``random`` is left alone: its swap would take as long as a hand-over, and engines do
not draw from it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand

_DEVICES = ("cpu", "cuda", "xpu", "mps")

_is_grad = torch.is_grad_enabled
_set_grad = torch._C._set_grad_enabled  # noqa: SLF001 - the public class of the same use is slow
_is_inference = torch.is_inference_mode_enabled
_is_autocast = torch._C._is_any_autocast_enabled  # noqa: SLF001 - has no public name

Autocast = tuple[tuple[str, bool, torch.dtype], ...]
"""For each device type, whether autocast is on and its dtype; empty if it is off for all."""

Modes = tuple[bool, bool, Autocast]
"""Grad mode, inference mode, autocast."""


def current() -> Modes:
    """Return the modes of the calling thread."""
    autocast = tuple(
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _DEVICES
    )
    return (_is_grad(), _is_inference(), autocast if _is_autocast() else ())


class ModeKeeper:
    """Stores a block's modes while the model runs, and the model's modes while the block runs.

    Inference mode has no setter: if the model must run without a block's, a guard is entered until it
    resumes.
    """

    __slots__ = ("_block", "_block_grad", "_entered", "_inference_mode", "_model", "_model_grad")

    def __init__(self) -> None:
        """Start the block in the modes of the model; None means no inference mode and no autocast."""
        self._block_grad = self._model_grad = _is_grad()
        self._model: Modes | None = current() if _is_inference() or _is_autocast() else None
        self._block: Modes | None = self._model
        self._entered: Any = None
        self._inference_mode: Any = None

    def enter(self) -> None:
        """Switch from the model's modes to the block's; called before the block runs."""
        self._model_grad = _is_grad()
        if self._block is not None or _is_inference() or _is_autocast():
            self._enter_slowly()
        elif self._model_grad is not self._block_grad:
            _set_grad(self._block_grad)

    def leave(self) -> None:
        """Switch from the block's modes to the model's; called when the block has handed over."""
        self._block_grad = _is_grad()
        if self._model is not None or _is_inference() or _is_autocast():
            self._leave_slowly()
        elif self._model_grad is not self._block_grad:
            _set_grad(self._model_grad)

    def _enter_slowly(self) -> None:
        """Do as ``enter`` where inference mode or autocast is on."""
        self._model = current()
        block = self._block or (self._block_grad, False, ())
        _, is_inference, _ = block
        if self._inference_mode is not None:
            self._inference_mode.__exit__(None, None, None)
            self._inference_mode = None
        if _is_inference() is not is_inference:
            self._entered = torch.inference_mode(is_inference)
            self._entered.__enter__()
        _set_modes(block)

    def _leave_slowly(self) -> None:
        """Do as ``leave`` where inference mode or autocast is on."""
        self._block = current()
        _, block_inference, block_autocast = self._block
        model, self._model = self._model or (self._model_grad, False, ()), None
        _, is_inference, _ = model
        if self._entered is not None:
            self._entered.__exit__(None, None, None)
            self._entered = None
        if _is_inference() is not is_inference:
            self._inference_mode = torch.inference_mode(is_inference)
            self._inference_mode.__enter__()
        _set_modes(model)
        if self._inference_mode is None and not block_inference and not block_autocast:
            self._block = None


def _set_modes(modes: Modes) -> None:
    """Set grad mode and autocast of this thread; inference mode has no setter."""
    grad, _, autocast = modes
    if autocast or _is_autocast():
        for device, enabled, dtype in autocast or [(name, False, None) for name in _DEVICES]:
            torch.set_autocast_enabled(device, enabled)
            if dtype is not None:
                torch.set_autocast_dtype(device, dtype)
    _set_grad(grad)


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
    """Return the functions that set the number of threads for the calling thread's kernels."""
    openmp = ctypes.CDLL(None).omp_set_num_threads  # torch loads its OpenMP for the whole process
    if not torch.backends.mkl.is_available():
        return (openmp,)
    mkl = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    return openmp, mkl.MKL_Set_Num_Threads_Local


class RandomStreams:
    """The generator states of the side that is not running."""

    __slots__ = ("_cpu", "_devices", "_numpy", "_seed")

    def __init__(self, seed: int) -> None:
        """Create the states of a block, by its seed; those of devices are created when they are used."""
        self._seed = seed
        self._cpu = torch.Generator().manual_seed(seed).get_state()
        self._numpy: np.random.BitGenerator = np.random.MT19937(seed)
        self._devices: dict[int, torch.Tensor] = {}

    def exchange(self) -> None:
        """Swap the generators' states with those kept here, as the other side runs from now on."""
        cpu = torch.default_generator.get_state()
        torch.default_generator.set_state(self._cpu)
        self._cpu = cpu
        numpy = mtrand.get_bit_generator()
        mtrand.set_bit_generator(self._numpy)
        self._numpy = numpy
        if torch.cuda.is_initialized():
            self._exchange_device(torch.cuda.current_device())

    def _exchange_device(self, device: int) -> None:
        """Swap the state of a device's generator, see ``exchange``."""
        generator = torch.cuda.default_generators[device]
        kept_state = self._devices.get(device)
        if kept_state is None:
            kept_state = torch.Generator(f"cuda:{device}").manual_seed(self._seed).get_state()
        self._devices[device] = generator.get_state()
        generator.set_state(kept_state)
