"""Options shared by both command lines: the server to test, and arguments of a server to start."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--url`` and ``--admin-key-file``; the file's content becomes ``admin_key``."""
    parser.add_argument(
        "--url",
        default="",
        help="address of the server; one is started if none is listening there, or without this option",
    )
    parser.add_argument(
        "--admin-key-file",
        dest="admin_key",
        type=_content,
        default=None,  # argparse would parse a text default as a path
        help="file that contains a key with the scope `admin`, for a running server with keys",
    )


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments before ``--``, and the server's options after it."""
    given = list(arguments)
    at = given.index("--") if "--" in given else len(given)
    return given[:at], given[at + 1 :]


def _content(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


__all__ = ["add_server_options", "split_arguments"]
