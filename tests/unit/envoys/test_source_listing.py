"""The printed source of a function, and functions that have none to offer."""

from __future__ import annotations

import functools
import linecache
import pathlib
import re
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch

from nnsight_engine.envoys.source.definition import (
    Rewritten,
    SourceNotAvailableError,
    format_operation,
    format_source,
)
from nnsight_engine.envoys.source.rewrite import rewrite


def just_call(name: str, callee: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return callee(*args, **kwargs)


def double(x: Any) -> Any:
    return x * 2


def printed() -> Rewritten:
    def forward(x: Any, other: bool = False) -> Any:
        # A comment.
        if other:
            x = double(x)

        x = abs(x).conjugate()
        return double(
            x,
        )

    return rewrite(forward, just_call, "forward")


def test_printed_source_shows_operations_at_their_lines() -> None:
    assert format_source(printed()).splitlines() == [
        "               0 def forward(x: Any, other: bool = False) -> Any:",
        "               1     # A comment.",
        "               2     if other:",
        "double_0    -> 3         x = double(x)",
        "               4",
        "abs_0       -> 5     x = abs(x).conjugate()",
        "conjugate_0 -> +",
        "double_1    -> 6     return double(",
        "               7         x,",
        "               8     )",
    ]


def test_printed_operation_shows_its_surroundings() -> None:
    rewritten = printed()
    assert format_operation(rewritten, rewritten.operations[-1], ".h.0.mlp").splitlines() == [
        ".h.0.mlp.double_1:",
        "",
        "    ....",
        "",
        "        # A comment.",
        "        if other:",
        "            x = double(x)",
        "",
        "        x = abs(x).conjugate()",
        "-->     return double( <--",
        "            x,",
        "        )",
    ]
    text = format_operation(rewritten, rewritten.operations[0], ".h.0.mlp")
    assert re.search(r"-->         x = double\(x\) <--\n", text)
    assert text.splitlines()[2] == "    def forward(x: Any, other: bool = False) -> Any:"
    assert text.endswith("....")


# Refusals.


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (len, "not written in Python"),
        (torch.relu, "not written in Python"),
        (torch.Tensor.view, "not written in Python"),
        (int, "type type"),
        (torch.nn.Linear(1, 1), "is a module, Linear; use `.source` of the module's own envoy"),
        (functools.partial(double), "functools.partial of"),
        (lambda x: double(x) + 1, "def statement"),
    ],
)
def test_what_has_no_source_is_refused(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(SourceNotAvailableError, match=f"^model.x has no operations to offer: .*{message}"):
        rewrite(function, just_call, "model.x")
    assert issubclass(SourceNotAvailableError, ValueError)


def compiled_function(text: str, filename: str) -> FunctionType:
    scope: dict[str, Any] = {}
    exec(compile(text, filename, "exec"), scope)
    function = scope["f"]
    assert isinstance(function, FunctionType)
    return function


def test_function_without_a_file_is_refused_unless_its_text_is_registered() -> None:
    text = "def f(x):\n    return abs(x)\n"
    function = compiled_function(text, "<made up 1>")
    with pytest.raises(SourceNotAvailableError, match="cannot be read"):
        rewrite(function, just_call, "f")
    linecache.cache["<made up 1>"] = (len(text), None, text.splitlines(keepends=True), "<made up 1>")
    assert rewrite(function, just_call, "f").function(-1) == 1


def test_file_edited_since_it_was_loaded_is_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "edited.py"
    text = "import math\n\ndef f(x):\n    return math.sin(abs(x)) * 2\n"
    path.write_text(text)
    function = compiled_function(text, str(path))
    assert len(rewrite(function, just_call, "f").operations) == 2
    for edited in (
        text.replace("2", "3"),
        text.replace("def f", "def g"),
        "\n" + text,
        text.replace("x", "y"),
    ):
        path.write_text(edited + "# changed\n")
        with pytest.raises(SourceNotAvailableError, match=r"differs from line 3|cannot be read"):
            rewrite(function, just_call, "f")


def test_function_that_lists_its_variables_is_refused() -> None:
    def function(x: int) -> Any:
        return dict(**locals())

    with pytest.raises(SourceNotAvailableError, match=r"calls locals\(\)"):
        rewrite(function, just_call, "f")


def test_decorators_that_cannot_be_kept_are_refused() -> None:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        registry = {"f": function}

        @functools.wraps(function)
        def wrapper(*args: Any) -> Any:
            return registry["f"](*args)

        return wrapper

    with pytest.raises(SourceNotAvailableError, match=r"decorator .*register.*wrapper does not reach"):
        rewrite(register(double), just_call, "f")
    with pytest.raises(SourceNotAvailableError, match="lru_cache"):
        rewrite(functools.lru_cache(double), just_call, "f")


def test_wrapper_that_leads_back_to_itself_is_refused() -> None:
    def function() -> None: ...

    function.__wrapped__ = function  # type: ignore[attr-defined]
    with pytest.raises(SourceNotAvailableError, match="leads back to itself"):
        rewrite(function, just_call, "f")
