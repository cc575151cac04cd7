"""Writes the record of the options of vLLM's ``serve``: ``python -m tests.unit.app.vllm_option_record``."""

from __future__ import annotations

import argparse
import json
from typing import Any

from vllm.entrypoints.cli.serve import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from app.engine.vllm_options import RECORD


def recorded() -> list[dict[str, Any]]:
    """Return flags, number of values, kind and choices of each option of the installed vLLM."""
    parser = make_arg_parser(FlexibleArgumentParser())
    return [_of(action) for action in parser._actions if action.option_strings and action.dest != "help"]


def _of(action: argparse.Action) -> dict[str, Any]:
    found: dict[str, Any] = {"flags": list(action.option_strings)}
    if action.nargs is not None:
        found["nargs"] = action.nargs
    if action.nargs != 0 and (kind := _kind(action)) != "text":
        found["kind"] = kind
    if action.choices is not None:
        found["choices"] = list(action.choices)
    return found


def _kind(action: argparse.Action) -> str:
    """Return what an option's value is, by what its type takes; JSON is a text here."""

    def takes(text: str) -> bool:
        try:
            action.type(text)  # type: ignore[operator, misc] # a function of vLLM's
        except (ValueError, TypeError, argparse.ArgumentTypeError):
            return False
        return True

    if action.type is None or takes("x") or takes("{}") or not takes("7"):
        return "text"
    return "size" if takes("1k") else "number" if takes("7.5") else "integer"


if __name__ == "__main__":
    lines = ",\n".join(json.dumps(one) for one in recorded())
    RECORD.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
