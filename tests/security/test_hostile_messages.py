"""Messages that no client writes, for the reader in a sandbox process: it refuses what could not run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nnsight_engine import NNsight
from nnsight_engine.sandbox.block_checker import CHECKED
from nnsight_engine.serialization import DecodeError, SandboxError
from nnsight_engine.serialization.message import NodeKind
from tests.security.host import Small, message_of, run
from tests.unit.serialization.messages import Writer, piece


@pytest.mark.parametrize("module", ["os", "sys", "ctypes", "subprocess", "posix", "__main__", "scipy.stats"])
def test_a_module_off_the_list_is_refused_by_its_name(module: str) -> None:
    for node in ((NodeKind.MODULE, module), (NodeKind.NAME, f"{module}:system")):
        writer = Writer()
        with pytest.raises(SandboxError, match=f"the module `{module}` is not part of .*there are abc, coll"):
            writer.read(writer.add(node[0], payload=node[1]))
    writer = Writer()
    with pytest.raises(SandboxError, match=f"the module `{module}`"):
        writer.read(
            writer.function(piece("def f(): pass\n", "f"), namespace=writer.namespace(module, is_real=True))
        )


@pytest.mark.parametrize(
    "text",
    [
        "def f(a):\n    return a.__globals__\n",
        "def f(a):\n    import os\n",
        "def f(a):\n    return [b async for b in a]\n",
        "async def f(a):\n    return a\n",
    ],
)
def test_functions_that_come_along_are_checked(text: str) -> None:
    writer = Writer()
    with pytest.raises(SandboxError, match=r"line [12] of <hostile>"):
        writer.read(writer.function(piece(text, "f")))


def test_code_has_its_globals_in_a_namespace() -> None:
    text = "def f():\n class C:\n  value = eval\n"
    writer = Writer()
    with pytest.raises(DecodeError, match="code has no namespace"):
        writer.read(writer.call(writer.function(piece(text, "f"), namespace=writer.error())))
    writer = Writer()
    nothing, none = writer.value(()), writer.value(None)
    source = writer.value(piece("class A: value = eval\n", "A"))
    with pytest.raises(DecodeError, match="code has no namespace"):
        writer.read(writer.add(NodeKind.CLASS, writer.error(), source, *[nothing] * 4, none, nothing))
    writer = Writer()
    with pytest.raises(DecodeError, match="code has no namespace"):
        writer.read(writer.add(NodeKind.SENT_MODULE, writer.error(), writer.value(())))
    writer = Writer()
    source = writer.value(piece("with a:\n    value = eval\n", "f"))
    with pytest.raises(DecodeError, match="code has no namespace"):
        writer.read(
            writer.add(
                NodeKind.BLOCK, writer.error(), source, writer.value((0, None)), *[nothing] * 2, nothing
            )
        )


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("def f():\n    return [i for i in 'abc']\n", "<listcomp>"),
        ("def f():\n    return (i for i in 'abc')\n", "<genexpr>"),
        ("def f():\n    class C:\n        value = 1\n    return C\n", "C"),
        ("def f():\n    def g(): pass\n    return g\n", "g"),
        ("def f():\n    return lambda: 1\n", "<lambda>"),
    ],
)
def test_a_function_is_the_definition_and_nothing_within_it(text: str, name: str) -> None:
    writer = Writer()
    with pytest.raises(DecodeError, match="the text defines f, not"):
        writer.read(writer.function(piece(text, name)))


@pytest.mark.parametrize("around", ["__nnsight_owner__", "__nnsight_block__", "A.b", "<listcomp>", ""])
def test_a_class_around_code_has_the_name_of_one(around: str) -> None:
    writer = Writer()
    nothing = writer.value(())
    source = writer.value((*piece("with a:\n    value = 1\n", "f")[:6], around, 0))
    block = writer.add(
        NodeKind.BLOCK, writer.namespace(), source, writer.value((0, None)), *[nothing] * 2, nothing
    )
    with pytest.raises(DecodeError, match="no class is called"):
        writer.read(block)


@pytest.mark.parametrize(
    "expression",
    ["+".join(["a"] * 20_000), "a" + ".T" * 20_000, "-" * 20_000 + "a", "a" + "[0]" * 20_000, "a" * 10],
)
def test_code_may_be_nested_too_deeply(expression: str) -> None:
    for depth in (len(expression), 900, 3000):
        writer = Writer()
        text = f"def f(a): return {expression[:depth].rstrip('+-.T[0') or 'a'}\n"
        try:
            writer.read(writer.function(piece(text, "f")))
        except DecodeError:
            continue


def with_a_block(loss: Any, model: Any) -> Any:
    found = []
    with loss.backward():
        found.append(model.__dict__)
    return found


def test_blocks_in_functions_that_came_along_are_checked_with_them() -> None:
    with pytest.raises(SandboxError, match="attribute `__dict__`"):
        run(message_of("f(1, 2)", f=with_a_block), NNsight(Small()), CHECKED, torch.ones(1, 5))


def test_the_text_of_a_block_is_not_that_of_another_piece_at_its_place() -> None:
    harmless = "def f(loss, out):\n    with loss.backward():\n        out.append(1)\n        out.append(2)\n"
    evil = "def f(loss, out):\n    '''\n        out.append(out.__class__)\n    '''\n"
    writer = Writer()
    function = writer.function(piece(harmless, "f"))
    other = writer.function(piece(evil, "f"))
    first, second = writer.read(writer.add(NodeKind.TUPLE, function, other))
    assert second is not first
    out: list[Any] = []
    first(torch.ones(1, requires_grad=True).sum(), out)
    assert out == [1, 2]
