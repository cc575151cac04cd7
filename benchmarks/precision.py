"""In which type models are measured: bfloat16, as served, but where the processor has no kernels for it.

On x86 processors without AVX-512 a step in bfloat16 takes several times as long as one in float32, and any
overhead would look small beside it; ``nnsight-engine serve`` chooses float32 there too. Imports nothing of
the project's.
"""

from __future__ import annotations

from typing import Final

import torch

DTYPE: Final = (
    torch.float32
    if torch.backends.cpu.get_cpu_capability() == "AVX2" and not torch.cuda.is_available()
    else torch.bfloat16
)
DTYPE_NAME: Final = str(DTYPE).removeprefix("torch.")
"""As vLLM's arguments and the tables have it."""
