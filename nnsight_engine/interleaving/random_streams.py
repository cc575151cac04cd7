"""Separate random number streams for blocks, with seeds of their own.

Where each of several ranks samples for itself, torch's generators must stay in step whatever a block draws.
So their states, and NumPy's, are swapped before a block runs and when it hands over. Python's ``random`` is
left alone: its swap would take as long as a hand-over, and engines do not draw from it.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.random import mtrand


class RandomStreams:
    """The generator states of the side that is not running."""

    __slots__ = ("_cpu", "_devices", "_numpy", "_seed")

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._cpu = torch.Generator().manual_seed(seed).get_state()
        self._numpy: np.random.BitGenerator = np.random.MT19937(seed)
        self._devices: dict[int, torch.Tensor] = {}

    def exchange(self) -> None:
        cpu = torch.default_generator.get_state()
        torch.default_generator.set_state(self._cpu)
        self._cpu = cpu
        numpy = mtrand.get_bit_generator()
        mtrand.set_bit_generator(self._numpy)
        self._numpy = numpy
        if torch.cuda.is_initialized():
            self._exchange_device(torch.cuda.current_device())

    def _exchange_device(self, device: int) -> None:
        generator = torch.cuda.default_generators[device]
        mine = self._devices.get(device)
        if mine is None:
            mine = torch.Generator(f"cuda:{device}").manual_seed(self._seed).get_state()
        self._devices[device] = generator.get_state()
        generator.set_state(mine)
