"""What changed code calls its guards: names that nobody can write, nor a message bind.

An exclamation mark is no part of an identifier. Python's compiler does not mind, and looks the names up among
the globals and the builtins; the policy refuses to bind anything but identifiers.
"""

from __future__ import annotations

from typing import Final

from nnsight_engine.core import untrusted_frames


def names_in(text: str) -> frozenset[str]:
    """Return the words of a text, which is how lists of names are written here."""
    return frozenset(text.split())


STEP: Final = "step!"
GET: Final = "get!"
STORE: Final = "store!"
SET: Final = "set!"
DELETE: Final = "delete!"
BEGIN_ATTRIBUTE: Final = "begin attribute!"
BEGIN_ITEM: Final = "begin item!"
FINISH: Final = "finish!"
ITEM: Final = "item!"
STORE_ITEM: Final = "store item!"
ONE: Final = "one!"
SLICE: Final = "slice!"
BINARY: Final = "binary!"
UNARY: Final = "unary!"
INPLACE: Final = "inplace!"
COMPARE: Final = "compare!"
SMALL: Final = "small!"
FORMATTED: Final = "formatted!"
JOINED: Final = "joined!"
SPREAD: Final = "spread!"
SPREAD_KEYS: Final = "spread keys!"
CALLEE: Final = "callee!"
IMPORT: Final = "import!"
OF_SUPER: Final = "of super!"
BASE: Final = "base!"
DEFINED: Final = "defined!"
LEAVING: Final = "leaving!"
STOP: Final = "stop!"
TOLD: Final = "told!"
DONE: Final = "done!"
SEVERAL: Final = "several!"
DISPLAYED: Final = "displayed!"
REFUSE_CALL: Final = untrusted_frames.REFUSE

MAGIC: Final = names_in(
    """
    __init__ __call__ __repr__ __str__ __len__ __bool__ __iter__ __next__ __contains__ __getitem__
    __setitem__ __delitem__ __enter__ __exit__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __hash__
    __add__ __radd__ __iadd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __floordiv__
    __mod__ __pow__ __matmul__ __rmatmul__ __neg__ __pos__ __abs__ __invert__ __and__ __or__ __xor__
    __post_init__
    """
)
"""Methods with names of Python's own that a class may define. None of those by which objects are made, copied
or looked up, by which libraries are told where an object's memory is, or what number it is: torch asks for
those while it goes through a list in C."""


def is_bindable(name: object) -> bool:
    """Tell whether code or a message may bind a name."""
    return type(name) is str and name.isidentifier() and not name.startswith("__")
