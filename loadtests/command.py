"""What both command lines share: which server, and what a server that is started is told."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--url`` and ``--admin-key-file``, whose content is ``admin_key``."""
    parser.add_argument(
        "--url", default="", help="the server; it is started where nobody listens, or without this"
    )
    parser.add_argument(
        "--admin-key-file",
        dest="admin_key",
        type=_content,
        default=None,  # text would be taken for a path
        help="a file with a key of the scope `admin`, of a server that has keys",
    )


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return what comes before ``--``, and the options for the server behind it."""
    given = list(arguments)
    at = given.index("--") if "--" in given else len(given)
    return given[:at], given[at + 1 :]


def _content(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


__all__ = ["add_server_options", "split_arguments"]
