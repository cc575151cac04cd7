"""Ways in which a block might get at what is not its own: each a piece of code, as a request sends it.

A block finds the variables ``x`` (a tensor), ``canary`` (a file that is not to be touched), ``port`` (of a
socket that nobody is to call), ``model`` and ``tracer``. What an attempt binds to ``got`` is what it has got
hold of. An attempt may run, as long as it gets nothing that is not in its process anyway.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One of them.

    Attributes:
        name: What it is called in tests.
        code: The block.
    """

    name: str
    code: str


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

    return [
        Attempt(f"{module.__name__.rpartition('.')[2]}-{name}", code.strip("\n"))
        for module in (walks, escapes, classes, libraries, engine, budgets, beneath)
        for name, code in module.ATTEMPTS.items()
    ]
