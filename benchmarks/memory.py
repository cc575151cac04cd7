"""Processes whose resident memory is compared: plain vLLM, and an engine able to intervene."""

from __future__ import annotations

import ctypes
import gc
import importlib
from pathlib import Path
from typing import Any, Final

from vllm import LLM, SamplingParams

from benchmarks.engine_arguments import engine_arguments

_BATCH: Final = 8
_PROMPT: Final = list(range(100, 164))
_MAX_TOKENS: Final = 16
_ROUNDS: Final = 2
"""Batches, so that everything that is loaded lazily is loaded."""


class EngineMemory:
    """An engine that has served requests; nothing of the project is imported for a plain one.

    Args:
        model: Its folder.
        kind: ``plain vLLM`` is vLLM's own, ``idle`` can intervene, and ``used`` has served requests that
            steer and capture, too.
    """

    def __init__(self, model: str, kind: str) -> None:
        if kind != "plain vLLM":
            self._engine: Any = _served_able(model, is_used=kind == "used")
            return
        self._engine = LLM(model=model, **engine_arguments(eager=True, max_num_seqs=_BATCH))
        params = SamplingParams(temperature=0.0, max_tokens=_MAX_TOKENS, ignore_eos=True)
        for _ in range(_ROUNDS):
            self._engine.generate([{"prompt_token_ids": _PROMPT}] * _BATCH, params, use_tqdm=False)

    def resident_bytes(self) -> int:
        """Return the resident memory of this process, after collecting garbage."""
        gc.collect()
        # The rest that the allocator keeps differs by tens of MB from one equal process to the next.
        ctypes.CDLL(None).malloc_trim(0)
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        sizes = [line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:")]
        if not sizes:
            raise OSError("memory is read from VmRSS in /proc/self/status; run this on Linux")
        return int(sizes[0]) * 1024


def _served_able(model: str, *, is_used: bool) -> Any:
    interventions: Any = importlib.import_module("benchmarks.interventions")
    engine: Any = importlib.import_module("benchmarks.engine")
    able = engine.StepwiseEngine(able=True, eager=True, max_num_seqs=_BATCH, model=model)
    contents = [interventions.nothing]
    if is_used:
        every = interventions.every
        contents += [interventions.steered(every), interventions.captured(every, "generated")]
    for _ in range(_ROUNDS):
        for content_of in contents:
            able.finish(
                [able.submit(_PROMPT, _MAX_TOKENS, content_of(index, able.shape)) for index in range(_BATCH)]
            )
    return able
