"""Persistent options of the library, kept in a file of the user's: ``CONFIG.APP.DEBUG = True``.

The file holds an API key: only its owner may read it, and it is replaced atomically. A file that cannot be
used causes a warning, never a failed import. Environment variables are not consulted. Options are read on hot
paths, so each is a plain attribute.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
import warnings
from pathlib import Path
from typing import Final, NoReturn

import platformdirs

_FILE_NAME: Final = "config.json"


class _Section:
    """The options of one subject. Assignment checks name and type; reading is a plain attribute access."""

    __slots__ = ()

    def __setattr__(self, name: str, value: object) -> None:
        """Set an option; AttributeError for an unknown name, TypeError for a value of another type."""
        expected = _option_types(self).get(name)
        if expected is None and not hasattr(type(self), name):
            raise AttributeError(f"no option {name!r}; there are {', '.join(_option_types(self))}")
        if expected is not None and not isinstance(value, expected):
            raise TypeError(f"{name} must be a {expected.__name__}, got {type(value).__name__}")
        object.__setattr__(self, name, value)


@dataclasses.dataclass(slots=True)
class AppOptions(_Section):
    """Options of how traces run and report.

    Attributes:
        DEBUG: Tracebacks also show the library's own frames.
        CROSS_INVOKER: Variables of one invoke can be used in the invokes after it.
        PYMOUNT: Every object has ``.save()`` inside a trace; without it there is the function ``save``.
        REMOTE_LOGGING: A remote trace prints its status while it waits.
    """

    DEBUG: bool = False
    CROSS_INVOKER: bool = True
    PYMOUNT: bool = True
    REMOTE_LOGGING: bool = True

    @property
    def TRACE_CACHING(self) -> bool:  # noqa: N802 - the name of an option
        """Always True: compiled traces are cached. Setting it warns and changes nothing."""
        return True

    @TRACE_CACHING.setter
    def TRACE_CACHING(self, _value: bool) -> None:  # noqa: N802 - a setter's only form
        message = "TRACE_CACHING is deprecated and has no effect: compiled traces are always kept"
        warnings.warn(message, DeprecationWarning, stacklevel=3)  # report the line that sets the option


@dataclasses.dataclass(slots=True)
class ApiOptions(_Section):
    """Options of the server that runs remote traces.

    Attributes:
        HOST: The server's address, such as ``http://127.0.0.1:8000``.
        KEY: The API key sent to the server; empty for a server without keys.
    """

    HOST: str = "http://127.0.0.1:8000"
    KEY: str = dataclasses.field(default="", repr=False)

    @property
    def APIKEY(self) -> str:  # noqa: N802 - the name of an option
        """The former name of ``KEY``, deprecated."""
        _warn_of_apikey(stacklevel=3)
        return self.KEY

    @APIKEY.setter
    def APIKEY(self, value: str) -> None:  # noqa: N802 - a setter's only form
        _warn_of_apikey(stacklevel=4)
        self.KEY = value


def _warn_of_apikey(stacklevel: int) -> None:
    warnings.warn("CONFIG.API.APIKEY is now CONFIG.API.KEY", DeprecationWarning, stacklevel=stacklevel)


class Config:
    """The sections of options and the file that stores them.

    Args:
        path: The file; it need not exist. Its options apply at once; all others have their defaults.
    """

    __slots__ = ("API", "APP", "_path")

    APP: AppOptions
    API: ApiOptions
    _path: Path

    def __init__(self, path: Path) -> None:
        object.__setattr__(self, "APP", AppOptions())
        object.__setattr__(self, "API", ApiOptions())
        object.__setattr__(self, "_path", path)
        for section, options in self._read().items():
            self._apply(section, options)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{name!r} cannot be set here; set an option of CONFIG.APP or CONFIG.API")

    def __repr__(self) -> str:
        """Show the options, but not the API key."""
        return f"Config({self.APP}, {self.API})"

    def save(self) -> None:
        """Store all current options in the file, as defaults of this user's later programs.

        Raises:
            OSError: The file cannot be written; the error names it.
        """
        self._write({name: dataclasses.asdict(section) for name, section in self._sections().items()})

    def set_default_api_key(self, key: str) -> None:
        """Set ``API.KEY`` and store this option alone in the file."""
        self.API.KEY = key
        self._write({"API": {"KEY": key}})

    def set_default_app_debug(self, debug: bool) -> None:  # noqa: FBT001 - the documented form of this call
        """Set ``APP.DEBUG`` and store this option alone in the file."""
        self.APP.DEBUG = debug
        self._write({"APP": {"DEBUG": debug}})

    def _sections(self) -> dict[str, AppOptions | ApiOptions]:
        return {"APP": self.APP, "API": self.API}

    def _apply(self, name: str, options: object) -> None:
        """Set the options of a section from the file; what does not fit is ignored with a warning."""
        section = self._sections().get(name)
        if section is None or not isinstance(options, dict):
            self._warn(f"ignored {name!r}; the sections are {', '.join(self._sections())}")
            return
        for option, value in options.items():
            if option not in _option_types(section):
                self._warn(f"ignored the unknown option {name}.{option}")
                continue
            try:
                setattr(section, option, value)
            except TypeError as error:
                self._warn(f"ignored {name}.{option}: {error}")

    def _read(self) -> dict[str, object]:
        """Return the file's content; empty, with a warning, if it cannot be used."""
        try:
            content = json.loads(self._path.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            self._warn(f"ignored all of it, it cannot be read: {error}")
            return {}
        if not isinstance(content, dict):
            self._warn(f"ignored all of it: expected an object, got a {type(content).__name__}")
            return {}
        return content

    def _write(self, changes: dict[str, dict[str, object]]) -> None:
        """Merge changes into the file and replace it atomically; unknown options in it are kept."""
        content = self._read()
        for name, options in changes.items():
            before = content.get(name)
            content[name] = (before if isinstance(before, dict) else {}) | options
        target = self._path.resolve()  # a symbolic link stays one
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, prepared = tempfile.mkstemp(dir=target.parent, prefix=f".{_FILE_NAME}.")  # mode 0600
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(content, file, indent=2)
                file.write("\n")
            Path(prepared).replace(target)
        except BaseException:
            with contextlib.suppress(OSError):
                Path(prepared).unlink()
            raise

    def _warn(self, message: str) -> None:
        warnings.warn(f"{self._path}: {message}", UserWarning, stacklevel=2)


def _option_types(section: object) -> dict[str, type]:
    if not isinstance(section, (AppOptions, ApiOptions)):
        return {}
    return {field.name: type(field.default) for field in dataclasses.fields(section)}


CONFIG: Final = Config(Path(platformdirs.user_config_dir("nnsight-engine")) / _FILE_NAME)
