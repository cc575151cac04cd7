"""The model in the arguments of ``serve``: the first one, or in one of the ways that vLLM also accepts."""

from __future__ import annotations

from collections.abc import Sequence

from app.command_error import CommandError

CONFIG = "--config"


def split_model(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the model, None if it is absent, and the options; a file of options comes first among them.

    The model is the first argument or the option ``--model``. A file of options may name it too.

    Raises:
        CommandError: It is given twice.
    """
    first = arguments[0] if arguments and not arguments[0].startswith("-") else None
    option, options = _taken("--model", arguments[1:] if first is not None else arguments)
    file, options = _taken(CONFIG, options)
    if first is not None and option is not None:
        raise CommandError("MODEL is given twice, as the first argument and as --model")
    return first or option, options if file is None else [CONFIG, file, *options]


def _taken(name: str, options: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return an option's value, None if it is not given, and the other options."""
    for index, one in enumerate(options):
        if one.startswith(f"{name}="):
            return one.removeprefix(f"{name}="), [*options[:index], *options[index + 1 :]]
        if one == name and index + 1 < len(options):
            return options[index + 1], [*options[:index], *options[index + 2 :]]
    return None, [*options]


__all__ = ["CONFIG", "split_model"]
