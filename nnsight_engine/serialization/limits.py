"""Resource limits of one message, and the policy for what decoding it may do: nothing, unless allowed."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable
from typing import Any

Check = Callable[[Any, str], None]
"""Reads the syntax of a received definition or block before it is compiled, see ``Policy``."""


_DATA_NAMES = frozenset(
    {
        *(
            ("builtins", name)
            for name in (
                "bool", "bytes", "complex", "dict", "float", "frozenset", "int", "list", "object", "set",
                "str", "tuple",
            )
        ),
        *(("collections", name) for name in ("Counter", "OrderedDict", "defaultdict")),
        *(("datetime", name) for name in ("date", "datetime", "time", "timedelta", "timezone")),
        ("decimal", "Decimal"),
        *(("pathlib", name) for name in ("PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath")),
        ("torch", "Tensor"),
        ("types", "SimpleNamespace"),
        ("uuid", "UUID"),
        ("uuid", "SafeUUID"),
    }
)  # fmt: skip
"""Classes that results consist of, in addition to the types that have a node kind of their own. ``deque``
is excluded: freeing nested deques overflows the C stack, at a depth that a message can reach."""
_OUTPUT_MODULES = ("transformers.modeling_outputs", "transformers.cache_utils", "torch.return_types")
_MODEL_MODULES = ("transformers.models.", "transformers.generation.")
_IMPORTED_MODULES = re.compile(
    r"transformers\.(models\.\w+\.((modeling|generation|tokenization|processing)_\w+|vision)|generation(\.\w+)+)"
)
"""Those of them that define outputs: importing any other, such as a conversion script, may run a program."""


@dataclasses.dataclass(frozen=True, slots=True)
class MessageLimits:
    """Limits of one message; each is checked before the memory is allocated or the time is spent.

    Attributes:
        max_text_bytes: Size of one string, and of one source fragment.
        max_key_depth: Nesting depth of tuples in a dict key or set member; hashing one recurses in C.
        max_key_work: Objects visited when the keys of one dict or set are hashed, repeated visits included.
        max_equal_hashes: Keys of one container that may share a hash; inserting n such keys takes n² steps.
        max_name_characters: Length of the name of a source fragment, of its file, or of its enclosing class.
        max_lines: Highest line number that a source fragment may claim.
        compressed: Whether compression is accepted. A small compressed message may expand to ``max_bytes``.
    """

    max_bytes: int = 16 * 2**30
    max_nodes: int = 4_000_000
    max_text_bytes: int = 256 * 2**20
    max_key_depth: int = 500
    max_key_work: int = 10_000_000
    max_equal_hashes: int = 100
    max_name_characters: int = 4096
    max_lines: int = 1_000_000
    compressed: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """What decoding a message may do.

    Attributes:
        may_import: Called with a module and a qualified name before either is looked up; may raise.
        allow_source: Whether code may be sent as source, and imported functions may be called. Decoding
            such a message may run the sender's code, for example class bodies.
        check: Refuses the tree of received code before it is compiled, with a ``DecodeError``. It is a part
            of the key under which compiled code is cached: give the same function for all messages.
    """

    may_import: Callable[[str, str], bool]
    allow_source: bool = False
    check: Check | None = None

    def allowing(self, classes: Iterable[type[Any]]) -> Policy:
        """Return this policy with these classes allowed in addition."""
        names = frozenset((kind.__module__, kind.__qualname__) for kind in classes)
        base_rule = self.may_import
        return dataclasses.replace(
            self, may_import=lambda module, name: (module, name) in names or base_rule(module, name)
        )


def _is_data(module: str, name: str) -> bool:
    """Return whether a message of data alone may name this; ``is_data_class`` then checks what it is."""
    if (module, name) in _DATA_NAMES:
        return True
    # No dotted name: it would lead through what the module imports to anything in the process.
    return name.isidentifier() and (
        module in _OUTPUT_MODULES
        or (_IMPORTED_MODULES.fullmatch(module) is not None and name.endswith("Output"))
    )


def is_data_class(value: object, module: str, name: str) -> bool:
    """Return whether an allowed name stands for a class of data, not for an import of its module."""
    if not isinstance(value, type):
        return False
    if (module, name) in _DATA_NAMES:
        return True
    if (value.__module__, value.__qualname__) != (module, name):
        return False
    return is_model_output(value) or not module.startswith(_MODEL_MODULES)


def is_model_output(kind: type) -> bool:
    return any(base.__name__ == "ModelOutput" for base in kind.__mro__)


def _anything(_module: str, _name: str) -> bool:
    return True


DATA_ONLY = Policy(_is_data)
"""For results: containers, tensors and model output classes, but no code, whichever server sent them."""

TRUSTED = Policy(_anything, allow_source=True)
"""For blocks, in a reader that runs their code anyway."""


class EncodeError(ValueError):
    """A value cannot be serialized; the message gives its path, its type, the reason and an alternative."""


class DecodeError(ValueError):
    """A message is not accepted: it is malformed, exceeds a limit, or is refused by the reader's policy."""


class SandboxError(DecodeError):
    """Code uses a feature that the sandbox does not offer; ``line`` is a line of the sender's own file."""

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line
