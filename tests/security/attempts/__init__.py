"""Ways in which a block might get at what is not its own: each a piece of code, as a request sends it.

A block finds the variables ``x`` (a tensor), ``canary`` (a file that is not to be touched), ``port`` (of a
socket that nobody is to call), ``model`` and ``tracer``. It is held off if it ends with an error, or if what
it has bound to ``got`` is false. ``host`` runs them; other harnesses take them from ``every_attempt``.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

Ground = Literal["restricted", "process"]


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One of them.

    Attributes:
        name: What it is called in tests.
        code: The block.
        ground: What holds it off: the restricted compile alone, or only a process that can be ended.
    """

    name: str
    code: str
    ground: Ground = "restricted"


def every_attempt() -> list[Attempt]:
    """Return all of them."""
    from tests.security.attempts import (  # noqa: PLC0415 - they import this
        beneath,
        budgets,
        classes,
        engine,
        escapes,
        libraries,
        walks,
    )

    found: list[Attempt] = []
    for module in (walks, escapes, classes, libraries, engine, budgets, beneath):
        kind = module.__name__.rpartition(".")[2]
        found += [Attempt(f"{kind}-{name}", code.strip("\n")) for name, code in module.ATTEMPTS.items()]
        found += [
            Attempt(f"{kind}-{name}", code.strip("\n"), "process")
            for name, code in getattr(module, "FOR_A_PROCESS", {}).items()
        ]
    return found
