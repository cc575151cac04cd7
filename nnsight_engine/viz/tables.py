"""A server's results, or the values that a trace saved, as a table for a notebook: names, kinds, shapes."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from typing import Any, Final

from nnsight_engine.viz.numbers import VizError, as_json

_MAX_TEXT: Final = 120
_HEAD: Final = ("name", "kind", "where", "content")


class ResultsTable:
    """Rows of text; a notebook shows them as a table, a terminal as lines."""

    def __init__(self, rows: list[tuple[str, str, str, str]]) -> None:
        self.rows = rows

    def __repr__(self) -> str:
        return "\n".join("  ".join(cell for cell in row if cell) for row in self.rows) or "no results"

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{name}</th>" for name in _HEAD)
        body = "".join(
            "<tr>"
            + "".join(f'<td style="text-align: left">{html.escape(cell)}</td>' for cell in row)
            + "</tr>"
            for row in self.rows
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def results_table(results: Any) -> ResultsTable:
    """Return the results of a choice's ``interventions``, or a trace's saved values by name, as a table.

    Args:
        results: A choice of a response, its ``interventions`` or their ``results``, as JSON or as objects of
            ``api_schemas``; or saved values by name.

    Raises:
        VizError: It is none of these.
    """
    content = as_json(results)
    for key in ("interventions", "results"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping):
        raise VizError(f"results by name are needed, got a {type(results).__name__}")
    return ResultsTable([row for name, value in content.items() for row in _rows(str(name), as_json(value))])


def _rows(name: str, value: Any) -> Iterator[tuple[str, str, str, str]]:
    """Yield the rows of one result, each of name, kind, where and content; see ``_HEAD``."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind in {"capture", "probe"}:
        for point, content in value["points"].items():
            yield name, str(kind), f"{point}, {_positions(value)}", _content(content)
    elif kind == "logit_lens":
        for layer, rows in value["layers"].items():
            tops = [row["top"][0]["token"] if row["top"] else "–" for row in rows]
            yield name, "logit_lens", f"layer {layer}, {_positions(value)}", _short(" ".join(map(repr, tops)))
    elif kind in {"detect", "stop", "flag"}:
        content = _content(value["scores"]) if kind == "detect" else ""
        yield name, str(kind), _positions(value) if value["positions"] else "", content
    elif kind == "features":
        strongest = ", ".join(_feature(row[0]) if row else "–" for row in value["features"])
        yield name, "features", _positions(value) if value["positions"] else "", _short(strongest)
    elif kind == "trace":
        for saved, content in value["saves"].items():
            yield f"{name}.{saved}", "trace", "", _content(content)
    else:
        yield name, type(value).__name__, "", _content(value)


def _feature(feature: Mapping[str, Any]) -> str:
    return str(feature["id"]) if feature["label"] is None else repr(feature["label"])


def _positions(result: Mapping[str, Any]) -> str:
    positions = result["positions"]
    span = f"{positions[0]}–{positions[-1]}" if len(positions) > 1 else str(*positions)
    return f"positions {span}" if len(positions) > 1 else f"position {span}"


def _content(value: Any) -> str:
    """Return a value in short: dtype and shape of a tensor, the text of others."""
    value = as_json(value)
    if isinstance(value, Mapping) and "dtype" in value and "shape" in value:
        return f"{value['dtype']} {list(value['shape'])}{', in a file' if 'url' in value else ''}"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return _short(repr(value))


def _short(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 1]}…"
