"""The options of vLLM's ``serve`` without vLLM, whose import takes up to a minute.

``recorded_options.json`` has those of the tested version; a test compares it with the installed one, and
``python -m tests.unit.app.vllm_option_record`` writes it. The rest is left to vLLM's own parser.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from nnsight_engine.core.errors import UnsupportedOptionError

RECORD: Final = Path(__file__).with_name("recorded_options.json")

_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)([kmgt])", re.IGNORECASE)
_POWERS: Final = "kmgt"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UnsupportedOptionError(message)


def parse_recorded(
    arguments: Sequence[str], own: Iterable[str] = (), *, is_complete: bool = True
) -> argparse.Namespace:
    """Return the values of vLLM's options as far as they can be told without vLLM; others are None.

    ``is_complete``: the installed vLLM is the recorded version; if not, nothing is refused. Raises
    UnsupportedOptionError for unknown options and wrong kinds of values.
    """
    options = json.loads(RECORD.read_text(encoding="utf-8"))
    parser = _Parser(add_help=False)
    for one in options:
        if one.get("nargs") == 0:
            parser.add_argument(*one["flags"], action="store_true", default=None)
        else:
            parser.add_argument(*one["flags"], nargs=one.get("nargs"), type=_reader(one))
    flags = [flag for one in options for flag in one["flags"]]
    try:
        args, unknown = parser.parse_known_args(_plain(arguments, flags))
        if unknown:
            _refuse(unknown[0], [*own, *flags])
    except UnsupportedOptionError:
        if is_complete:
            raise
        return parser.parse_args([])
    return args


def _refuse(argument: str, known: Sequence[str]) -> NoReturn:
    if not argument.startswith("-"):
        raise UnsupportedOptionError(
            f"unexpected argument {argument!r}: MODEL, a single one, comes before the options"
        )
    name = argument.partition("=")[0]
    similar = difflib.get_close_matches(name, known, n=1)
    hint = (
        f"did you mean {similar[0]}?"
        if similar
        else "serve --help and vllm serve --help=all list the options"
    )
    raise UnsupportedOptionError(f"there is no option {name}; {hint}")


def _plain(arguments: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Return the arguments in the form of argparse: dashes in names, no keys of JSON options."""
    plain: list[str] = []
    rest = iter(arguments)
    for one in rest:
        name, equals, _ = one.partition("=")
        base, _, key = name.partition(".")
        base = base.replace("_", "-") if base.startswith("--") else base
        if one.startswith("-O") or (key and base in flags):
            if one == "-O" or (key and not equals):
                next(rest, None)
            continue
        plain.append(f"{base}{one[len(base) :]}" if one.startswith("--") else one)
    return plain


def _reader(option: dict[str, Any]) -> Callable[[str], Any]:
    kind, choices = option.get("kind", "text"), option.get("choices")
    convert, words = _KINDS[kind]

    def read(text: str) -> Any:
        if text in {"", "None", "auto"} and not choices:
            return None
        try:
            value = convert(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"it must be {words}, got {text!r}") from None
        if choices and value not in choices:
            similar = difflib.get_close_matches(text, map(str, choices), n=1)
            hint = f"; did you mean {similar[0]}?" if similar else ""
            raise argparse.ArgumentTypeError(
                f"it must be one of {', '.join(map(str, choices))}, got {text!r}{hint}"
            )
        return value

    return read


def _size(text: str) -> int:
    """Return a number such as ``25.6k`` or ``4K``, which are 25600 and 4096."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        return int(text)
    power = _POWERS.index(found[2].lower()) + 1
    return int(float(found[1]) * (1000 if found[2].islower() else 1024) ** power)


_KINDS: Final[dict[str, tuple[Callable[[str], Any], str]]] = {
    "text": (str, "a text"),
    "integer": (int, "a whole number"),
    "number": (float, "a number"),
    "size": (_size, "a whole number, such as 4096 or 4k"),
}
"""The conversion of each kind of value, and its name in messages."""


__all__ = ["RECORD", "parse_recorded"]
