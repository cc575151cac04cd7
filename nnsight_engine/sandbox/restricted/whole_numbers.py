"""Whole numbers of any length, whose arithmetic can take as long as one likes: bounded where they are made.

Python's own arithmetic is quadratic in the digits, and no step is counted within it. Numbers are made by
operators, by ``int`` and by a message; the operators that take more than one pass look at both sides.
"""

from __future__ import annotations

from typing import Any, Final

from nnsight_engine.sandbox.restricted.budget import refusal

_MAX_BITS: Final = 100_000
_MAX_EXPONENT_BITS: Final = 2048
_MAX_PLACES: Final = 1000
SLOW: Final = frozenset({"**", "*", "<<", "//", "%", "/"})
"""Operators whose results may be long, or which take more than one pass."""


def check_int(value: Any) -> Any:
    """Refuse numbers that are too long, and return the others, and what is no whole number."""
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise _too_long()
    return value


def _too_long() -> Exception:
    return refusal(f"a whole number of more than {_MAX_BITS:,} bits", "use a float")


def check_ints(operator: str, left: int, right: int) -> None:
    """Refuse operators whose result is too long, or which take too long."""
    check_int(left)
    check_int(right)
    if operator == "**":
        num_bits = left.bit_length() * right if right > 0 and abs(left) > 1 else 0
    elif operator == "*":
        num_bits = left.bit_length() + right.bit_length()
    elif operator == "<<":
        num_bits = left.bit_length() + right if left else 0
    else:
        return
    if num_bits > _MAX_BITS:
        raise _too_long()


def make_int(value: Any = 0, *base: Any) -> int:
    """Do what ``int`` does, with no more digits than are allowed."""
    if isinstance(value, str | bytes) and len(value) > _MAX_BITS:
        raise _too_long()
    made = int(check_int(value), *base)
    return int(check_int(made))


def power_modulo(base: Any, exponent: Any, modulus: Any) -> Any:
    """Do what ``pow`` does with three arguments."""
    for one in (base, modulus):
        check_int(one)
    if isinstance(exponent, int) and exponent.bit_length() > _MAX_EXPONENT_BITS:
        raise refusal(f"`pow` with an exponent of more than {_MAX_EXPONENT_BITS:,} bits and a modulus")
    return pow(base, exponent, modulus)


def divide_with_rest(left: Any, right: Any) -> Any:
    """Do what ``divmod`` does."""
    return divmod(check_int(left), check_int(right))


def rounded(value: Any, *places: Any) -> Any:
    """Do what ``round`` does; ``round(5, -n)`` computes ``10 ** n``."""
    if any(isinstance(one, int) and abs(one) > _MAX_PLACES for one in places):
        raise refusal(f"`round` to more than {_MAX_PLACES:,} places")
    return round(check_int(value), *places)
