"""Rounds of the fuzzer: one server for some seconds, in a process that a crash may take along."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any, Final

from tests.e2e.check_process import report_of

BUNDLED: Final = "bundled"
"""Stands for a family: the bundled model, with its own tokenizer and thirty layers."""
FAMILIES: Final = ("llama", "qwen3", BUNDLED, "gpt2", "gemma2", "opt", "phi3")
"""What rounds take turns over; their number and that of dtypes and shapes have no common divisor."""
DTYPES: Final = ("float32", "bfloat16")
SHAPES: Final = ("roomy", "tight", "compiled")
MOST_FAILURES: Final = 3
_STARTING_S: Final = 300.0
_ENVIRONMENT: Final = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Round:
    """What is played.

    Attributes:
        family: Of the tiny checkpoint, or ``BUNDLED``.
        dtype: The server's, of ``DTYPES``.
        shape: The engine's, of ``SHAPES``.
        seed: Of the cases.
        seconds: For how long random cases are begun.
        case: A case to play instead, and nothing else.
    """

    family: str
    dtype: str
    shape: str
    seed: int = 0
    seconds: float = 60.0
    case: list[dict[str, Any]] | None = None

    def to_json(self) -> str:
        """Return it as one line, which ``--replay`` reads."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Round:
        return cls(**json.loads(text))


@dataclasses.dataclass(slots=True)
class Report:
    """What came of a round; with what was wrong, as JSON, the round that shows it."""

    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    failures: list[tuple[list[str], str]] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        counts = ", ".join(f"{number} {what}" for what, number in sorted(self.counts.items()))
        return "\n".join([counts, *(f"WRONG {'; '.join(faults)}\n{case}" for faults, case in self.failures)])


def play_round(played: Round) -> Report:
    """Play a round in a process of its own; raises AssertionError where that dies."""
    name, timeout_s = played.to_json(), played.seconds + _STARTING_S
    with tempfile.TemporaryDirectory() as folder:
        found = report_of(
            "tests.e2e.fuzz.child", Path(folder), [name], environment=_ENVIRONMENT, timeout_s=timeout_s
        )
    return Report(**found[name])
