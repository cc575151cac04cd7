"""What one message may cost, and what it may make the reading side do.

Both are arguments of ``decode``: a server that runs its users' blocks and a client that reads a server's
results trust the other side differently. Nothing is imported, compiled or called without the policy's leave.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from nnsight_engine.wire.rules import FREE, Rules

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
"""What results are made of, beside what has a kind of its own. Not ``deque``: freeing nested ones overflows
the stack, at a depth that a message can have."""
_OUTPUT_MODULES = ("transformers.modeling_outputs", "transformers.cache_utils", "torch.return_types")
_MODEL_MODULES = ("transformers.models.", "transformers.generation.")


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on one message; each is checked before the memory or the time is spent.

    Attributes:
        max_bytes: The whole message, tensors included.
        max_nodes: Objects in it.
        max_text_bytes: One string, and one piece of source.
        max_key_depth: Tuples within tuples in a key or a set's item: hashing one is recursion in C.
        max_key_work: Objects that hashing the keys of one dict or set passes through, repeated ones counted.
        max_equal_hashes: Keys of one dict or set that share a hash; filling it takes their number squared.
        max_name_characters: The name of a piece of source, of its file, or of the class around it.
        max_lines: Line number that a piece of source may claim.
        compressed: Whether it may be compressed: a small message then becomes as large as it may be.
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
    """What a message may make the reader do.

    Attributes:
        may_import: Asked with a module and a qualified name before either is looked up.
        allow_source: Whether functions, classes and blocks may come as source, and imported functions may
            be called. Reading such a message may run its sender's code, class bodies for one.
        rules: What code that comes as source may do, and what becomes of it.
    """

    may_import: Callable[[str, str], bool]
    allow_source: bool = False
    rules: Rules = FREE

    def allowing(self, classes: Iterable[type[Any]]) -> Policy:
        """Return the policy with these classes allowed too: a client's own, whose instances come back."""
        names = frozenset((kind.__module__, kind.__qualname__) for kind in classes)
        before = self.may_import
        return dataclasses.replace(
            self, may_import=lambda module, name: (module, name) in names or before(module, name)
        )


def _is_data(module: str, name: str) -> bool:
    if (module, name) in _DATA_NAMES:
        return True
    # No dotted name: it would lead through what the module imports to anything in the process.
    return name.isidentifier() and (
        module in _OUTPUT_MODULES or (module.startswith(_MODEL_MODULES) and name.endswith("Output"))
    )


def is_data_class(value: object, module: str, name: str) -> bool:
    """Return whether what was found under an allowed name is the class of data that the name stands for.

    A module also has names that it imports, which the patterns of ``DATA_ONLY`` cannot tell from its own.
    """
    if not isinstance(value, type):
        return False
    if (module, name) in _DATA_NAMES:
        return True
    if (value.__module__, value.__qualname__) != (module, name):
        return False
    is_model_output = any(base.__name__ == "ModelOutput" for base in value.__mro__)
    return is_model_output or not module.startswith(_MODEL_MODULES)


def _anything(_module: str, _name: str) -> bool:
    return True


DATA_ONLY = Policy(_is_data)
"""For results: containers, tensors and what models give out; no code, whoever answers."""

TRUSTED = Policy(_anything, allow_source=True)
"""For blocks, by a reader that runs their code in any case."""
