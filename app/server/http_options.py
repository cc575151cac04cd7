"""Options of vLLM's server that concern HTTP, applied to this server with the same meaning."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from app.command_error import CommandError
from app.server.sockets import HeadLimits

_HIDDEN_LEVELS: Final = {"debug", "trace"}


@dataclasses.dataclass(frozen=True, slots=True)
class HttpOptions:
    """Changes to the application, before it is made.

    ``allow_credentials`` lets browsers send cookies and stored keys; ``middleware`` has the outermost last.
    """

    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    middleware: tuple[Callable[..., Any], ...] = ()
    has_docs: bool = True
    repeats_request_ids: bool = False

    @classmethod
    def of(cls, args: argparse.Namespace) -> HttpOptions:
        """Return the options among vLLM's parsed arguments; imports the middleware; raises CommandError."""
        names = ("allowed_origins", "allowed_methods", "allowed_headers")
        return cls(
            **{name: _text_list(name, getattr(args, name)) for name in names},
            allow_credentials=args.allow_credentials,
            middleware=tuple(map(_import_middleware, args.middleware)),
            has_docs=not args.disable_fastapi_docs,
            repeats_request_ids=args.enable_request_id_headers,
        )

    def add_to(self, app: FastAPI) -> None:
        """Add the middleware outside of all that the application has, so that errors pass it too."""
        if self.allowed_origins:
            app.add_middleware(
                CORSMiddleware,
                allow_origins=self.allowed_origins,
                allow_methods=self.allowed_methods,
                allow_headers=self.allowed_headers,
                allow_credentials=self.allow_credentials,
            )
        for layer in self.middleware:
            if inspect.isclass(layer):
                app.add_middleware(layer)  # type: ignore[arg-type]  # what it takes is up to the operator
            else:
                app.middleware("http")(layer)


def listening_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the keywords of ``server_config``; CommandError for a missing file of TLS or a wrong limit."""
    options: dict[str, Any] = {"head_limits": _head_limits(args)}
    if args.uds:
        return {**options, "uds": args.uds}
    if not (args.ssl_certfile or args.ssl_keyfile):
        if args.enable_ssl_refresh:
            raise CommandError("--enable-ssl-refresh needs --ssl-certfile")
        return options
    names = ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs")
    files = {name: getattr(args, name) for name in names if getattr(args, name)}
    for name, file in files.items():
        if not Path(file).is_file():
            raise CommandError(f"--{name.replace('_', '-')} must be a file, and {file!r} is none")
    if "ssl_certfile" not in files:
        raise CommandError("--ssl-keyfile needs --ssl-certfile, the certificate of the key")
    ciphers = {"ssl_ciphers": args.ssl_ciphers} if args.ssl_ciphers else {}
    return {**options, **files, "ssl_cert_reqs": args.ssl_cert_reqs, **ciphers}


def log_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the keywords of ``limit_logs``; CommandError if uvicorn would log headers, which have keys."""
    if args.uvicorn_log_level in _HIDDEN_LEVELS:
        raise CommandError(
            f"--uvicorn-log-level {args.uvicorn_log_level} is not supported: uvicorn logs headers at this "
            "level, with the clients' keys; use info"
        )
    excluded = (args.disable_access_log_for_endpoints or "").split(",")
    return {
        "uvicorn_level": args.uvicorn_log_level.upper(),
        "logs_requests": not args.disable_uvicorn_access_log,
        "excluded": frozenset(path.strip() for path in excluded if path.strip()),
    }


def _head_limits(args: argparse.Namespace) -> HeadLimits:
    """Return the limits; vLLM's defaults, which are larger than ours, count as not given."""
    vllm_limits = {
        "max_bytes": ("h11_max_incomplete_event_size", 4 * 2**20),
        "max_headers": ("h11_max_header_count", 256),
    }
    limits: dict[str, int] = {}
    for field, (name, default) in vllm_limits.items():
        value = getattr(args, name)
        if value < 1:
            raise CommandError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        if value != default:
            limits[field] = value
    return HeadLimits(**limits)


def _text_list(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise CommandError(
            f"--{name.replace('_', '-')} must be a JSON list of texts, such as '[\"https://example.org\"]'"
        )
    return tuple(value)


def _import_middleware(path: str) -> Callable[..., Any]:
    module, _, name = path.rpartition(".")
    try:
        middleware: Any = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise CommandError(f"--middleware {path} cannot be imported: {error}") from error
    if not (inspect.isclass(middleware) or inspect.iscoroutinefunction(middleware)):
        raise CommandError(f"--middleware {path} must name a class, or a function with `async def`")
    return middleware  # type: ignore[no-any-return]  # both can be called
