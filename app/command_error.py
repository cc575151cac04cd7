from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from pydantic import ValidationError

from app.settings import Settings, misspelt_variable, removed_variable


class CommandError(Exception):
    """A command that cannot run; the message says how to change it."""


def read_settings(options: Mapping[str, Any] | None = None) -> Settings:
    """Return the settings of the environment, overridden by ``options``; CommandError if one is wrong."""
    removed = removed_variable()
    if removed is not None:
        raise CommandError(f"{removed} is gone: it is a constant now (decision 64); remove the variable")
    misspelt = misspelt_variable()
    if misspelt is not None:
        name, setting = misspelt
        raise CommandError(f"there is no setting {name}; did you mean {setting}? See docs/settings.md")
    try:
        return Settings(**(options or {}))
    except ValidationError as error:
        raise _settings_error(error, options or ()) from error


def _settings_error(error: ValidationError, options: Collection[str]) -> CommandError:
    """Return the error of the first wrong setting, by the name of its option or of its variable."""
    problem = error.errors(include_url=False)[0]
    name = ".".join(map(str, problem["loc"]))
    message = f"{problem['msg']}, got {problem['input']!r}; see docs/settings.md"
    if name in options:
        return CommandError(f"--{name.replace('_', '-')}: {message}")
    # Otherwise the location is the name of an environment variable with an alias.
    if name in Settings.model_fields:
        name = f"{Settings.model_config['env_prefix']}{name}".upper()
    return CommandError(f"the variable {name} is wrong: {message}")
