"""The error of a command that cannot run, also for invalid settings."""

from __future__ import annotations

from collections.abc import Collection

from pydantic import ValidationError

from app.settings import Settings


class CommandError(Exception):
    """A command that cannot run; the message says what to change."""


def settings_error(error: ValidationError, options: Collection[str] = ()) -> CommandError:
    """Return the error for the first invalid setting.

    Args:
        error: The problems of all settings.
        options: Settings that the command line sets; others are environment variables.
    """
    first = error.errors(include_url=False)[0]
    name = ".".join(map(str, first["loc"]))
    problem = f"{first['msg']}, got {first['input']!r}; see docs/settings.md"
    if name in options:
        return CommandError(f"--{name.replace('_', '-')}: {problem}")
    # Otherwise the location is the name of an environment variable with an alias.
    if name in Settings.model_fields:
        name = f"{Settings.model_config['env_prefix']}{name}".upper()
    return CommandError(f"the variable {name} is wrong: {problem}")


__all__ = ["CommandError", "settings_error"]
