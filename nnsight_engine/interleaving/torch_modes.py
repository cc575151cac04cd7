"""Thread-local modes of torch, kept apart for the model and for each block, which share one thread.

A block may wait within its own ``no_grad``, ``inference_mode`` or ``autocast``, and run while the model is
within some of them. Grad mode differs often and is swapped on a fast path; the other two are seldom on.
"""

from __future__ import annotations

from typing import Any

import torch

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
    autocast = tuple(
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _DEVICES
    )
    return (_is_grad(), _is_inference(), autocast if _is_autocast() else ())


class ModeKeeper:
    """Stores a block's modes while the model runs, and the model's modes while the block runs.

    Inference mode has no setter: if the model must run without a block's, a guard is entered until it
    resumes.
    """

    __slots__ = ("_block", "_block_grad", "_entered", "_left", "_model", "_model_grad")

    def __init__(self) -> None:
        self._block_grad = self._model_grad = _is_grad()
        self._model: Modes | None = current() if _is_inference() or _is_autocast() else None
        self._block: Modes | None = self._model
        self._entered: Any = None
        self._left: Any = None

    def enter(self) -> None:
        self._model_grad = _is_grad()
        if self._block is not None or _is_inference() or _is_autocast():
            self._enter_slowly()
        elif self._model_grad is not self._block_grad:
            _set_grad(self._block_grad)

    def leave(self) -> None:
        self._block_grad = _is_grad()
        if self._model is not None or _is_inference() or _is_autocast():
            self._leave_slowly()
        elif self._model_grad is not self._block_grad:
            _set_grad(self._model_grad)

    def _enter_slowly(self) -> None:
        self._model = current()
        block = self._block or (self._block_grad, False, ())
        if self._left is not None:
            self._left.__exit__(None, None, None)
            self._left = None
        if _is_inference() is not block[1]:
            self._entered = torch.inference_mode(block[1])
            self._entered.__enter__()
        _set(block)

    def _leave_slowly(self) -> None:
        self._block = current()
        model, self._model = self._model or (self._model_grad, False, ()), None
        if self._entered is not None:
            self._entered.__exit__(None, None, None)
            self._entered = None
        if _is_inference() is not model[1]:
            self._left = torch.inference_mode(model[1])
            self._left.__enter__()
        _set(model)
        if self._left is None and not self._block[1] and not self._block[2]:
            self._block = None


def _set(modes: Modes) -> None:
    if modes[2] or _is_autocast():
        for device, enabled, dtype in modes[2] or [(one, False, None) for one in _DEVICES]:
            torch.set_autocast_enabled(device, enabled)
            if dtype is not None:
                torch.set_autocast_dtype(device, dtype)
    _set_grad(modes[0])
