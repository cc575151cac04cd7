"""What a block draws at random comes from streams of its own, seeded for it.

Torch's generators are one per device and process, and an engine samples tokens from them; where several
ranks sample each for itself, they must go on in step whatever a block draws. So whoever runs a block swaps
the generators' states for the block's, and swaps them again when it hands over. NumPy's is treated
likewise; that of Python's ``random`` would take as long as a hand-over, and engines do not draw from it.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.random import mtrand


class RandomStreams:
    """The generators' states of whichever side is not running.

    Args:
        seed: What the block's streams begin with.
    """

    __slots__ = ("_cpu", "_devices", "_numpy", "_seed")

    def __init__(self, seed: int) -> None:
        """Start with the block's."""
        self._seed = seed
        self._cpu = torch.Generator().manual_seed(seed).get_state()
        self._numpy: np.random.BitGenerator = np.random.MT19937(seed)
        self._devices: dict[int, torch.Tensor] = {}

    def exchange(self) -> None:
        """Put these states in place and keep those that were."""
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
