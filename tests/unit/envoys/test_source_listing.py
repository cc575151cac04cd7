from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from nnsight_engine.envoys.source.listing import format_operation, format_source
from nnsight_engine.envoys.source.operations import Rewritten
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


def test_function_without_calls_is_printed_plainly() -> None:
    def function(x: int) -> int:
        return x + 1

    rewritten = rewrite(function, just_call, "f")
    assert rewritten.operations == ()
    assert rewritten.function(1) == 2
    assert format_source(rewritten).splitlines()[1].strip() == "1     return x + 1"
