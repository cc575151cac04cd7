"""Messages that no client writes, for a restricted reader: names, classes and states of anything."""

from __future__ import annotations

import builtins
import collections
from types import ModuleType
from typing import Any

import pytest
import torch

from nnsight_engine import NNsight
from nnsight_engine.sandbox.restricted import Budget, restricted_policy
from nnsight_engine.sandbox.restricted.policy import RestrictedRules
from nnsight_engine.serialization import DecodeError, SandboxError, decode, encode
from nnsight_engine.serialization.node_kinds import NodeKind
from tests.security.host import Small, message_of, run
from tests.unit.serialization.test_hostile import message

_LINE = 1


def piece(text: str, name: str, column: int = -1) -> tuple[Any, ...]:
    return ("<hostile>", text, _LINE, column, name, name, None, 0)


class Writer:
    """Builds a message of nodes, parts before what is made of them."""

    def __init__(self) -> None:
        self.nodes: list[tuple[NodeKind, list[int], Any]] = [(NodeKind.LIST, [], None)]

    def add(self, kind: NodeKind, *children: int, payload: Any = None) -> int:
        self.nodes.append((kind, list(children), payload))
        return len(self.nodes) - 1

    def value(self, value: Any) -> int:
        if isinstance(value, tuple):
            return self.add(NodeKind.TUPLE, *map(self.value, value))
        if isinstance(value, dict):
            return self.add(NodeKind.DICT, *[self.value(one) for item in value.items() for one in item])
        kind = {str: NodeKind.STR, int: NodeKind.INT, type(None): NodeKind.NONE, bool: NodeKind.TRUE}[
            type(value)
        ]
        if value is False:
            kind = NodeKind.FALSE
        return self.add(kind, payload=value if kind in {NodeKind.STR, NodeKind.INT} else None)

    def name(self, module: str, name: str) -> int:
        return self.add(NodeKind.NAME, payload=f"{module}:{name}")

    def namespace(self, name: str = "mine", *, is_real: bool = False) -> int:
        return self.add(NodeKind.NAMESPACE, self.value(name), self.value(None), self.value(is_real))

    def function(
        self,
        text: str,
        name: str,
        *,
        namespace: int | None = None,
        globals_: dict[str, int] | None = None,
        cells: dict[str, int] | None = None,
        attributes: int | None = None,
        is_real: bool = False,
    ) -> int:
        held = [self.add(NodeKind.CELL, value) for value in (cells or {}).values()]
        none = self.value(None)
        return self.add(
            NodeKind.FUNCTION,
            self.namespace("os" if is_real else "mine", is_real=is_real) if namespace is None else namespace,
            self.value(piece(text, name)),
            self.value(tuple(cells or ())),
            self.add(NodeKind.TUPLE, *held),
            self.value((name, name, "mine")),
            none,
            none,
            none if attributes is None else attributes,
            self.value(tuple(globals_ or ())),
            *(globals_ or {}).values(),
        )

    def error(self) -> int:
        """Add an object that has attributes, as a namespace has."""
        none, nothing = self.value(None), self.value(())
        return self.add(NodeKind.NEW, self.name("builtins", "ValueError"), nothing, none, *[none] * 4)

    def call(self, function: int, *args: Any) -> int:
        none = self.value(None)
        return self.add(NodeKind.CALL, function, self.value(args), none, *[none] * 4)

    def read(self, root: int, **options: Any) -> Any:
        self.nodes[0] = (NodeKind.LIST, [root], None)
        (value,) = decode(message(*self.nodes), policy=restricted_policy(Budget(max_steps=1000)), **options)
        return value


NAMES = [
    ("os", "system"),
    ("builtins", "eval"),
    ("builtins", "__import__"),
    ("builtins", "getattr.__self__"),
    ("torch", "load"),
    ("torch", "os"),
    ("torch._C", "_load"),
    ("torch.nn.modules.module", "torch"),
    ("numpy.testing", "run"),
    ("sys", "modules"),
    ("nnsight_engine", "LanguageModel"),
    ("nnsight_engine.core.saves", "SAVES"),
    ("collections", "_sys"),
    ("ctypes", "CDLL"),
    ("types", "FunctionType"),
    ("types", "CodeType"),
    ("builtins", "type.__subclasses__"),
    ("torch", "Tensor.__class__"),
    ("functools", "partial.func"),
    ("pathlib", "Path"),
    ("builtins", "BaseException"),
    ("torch", "nn.functional.torch"),
    ("builtins", "print.__self__"),
    ("builtins", "get!"),
    ("transformers.modeling_outputs", "torch"),
]


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_a_name_is_what_the_list_has(module: str, name: str) -> None:
    writer = Writer()
    try:
        found = writer.read(writer.name(module, name))
    except DecodeError:
        return
    with pytest.raises(SandboxError):  # a builtin that refuses to be called
        found()


@pytest.mark.parametrize(
    "module", ["os", "sys", "torch._C", "torch.utils", "ctypes", "builtins.x", "__main__"]
)
def test_a_module_is_one_of_the_list(module: str) -> None:
    writer = Writer()
    try:
        found = writer.read(writer.add(NodeKind.MODULE, payload=module))
    except SandboxError:
        return
    assert not isinstance(found, ModuleType)


def test_modules_are_never_themselves() -> None:
    for name in ("torch", "torch.nn", "numpy", "math", "builtins", "random", "collections"):
        found = decode(message((NodeKind.MODULE, [], name)), policy=restricted_policy(Budget()))
        assert not isinstance(found, ModuleType)
        assert not hasattr(found, "__dict__")


@pytest.mark.parametrize(
    "name", ["get!", "step!", "stop!", "__builtins__", "__class__", "a.b", "", "__import__"]
)
def test_guards_cannot_be_bound(name: str) -> None:
    text = "def f():\n    while True: pass\n"
    writer = Writer()
    with pytest.raises(SandboxError, match="not for code"):
        writer.read(writer.function(text, "f", globals_={name: writer.value(1)}))
    if name == "__class__":
        return
    writer = Writer()
    with pytest.raises(SandboxError, match="not for code"):
        writer.read(writer.function(text, "f", cells={name: writer.value(1)}))


def test_a_function_of_an_installed_module_is_refused() -> None:
    writer = Writer()
    with pytest.raises(SandboxError, match="installed module os"):
        writer.read(writer.function("def f(): return environ\n", "f", is_real=True))


def test_functions_see_the_sandbox_s_builtins_alone() -> None:
    writer = Writer()
    function = writer.read(writer.function("def f(): return open\n", "f"))
    assert function() is not open
    assert function.__globals__["__builtins__"] is not vars(builtins)
    with pytest.raises(SandboxError, match="`open`"):
        function()("/etc/passwd")


def test_code_has_its_globals_in_a_namespace() -> None:
    text = "def f():\n class C:\n  value = eval\n"
    writer = Writer()
    with pytest.raises(DecodeError, match="code has no namespace"):
        writer.read(writer.call(writer.function(text, "f", namespace=writer.error())))
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
        writer.read(writer.function(text, name))


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


def test_what_a_message_calls_is_what_code_could_call() -> None:
    model = NNsight(Small())
    writer = Writer()
    layer = writer.add(NodeKind.REFERENCE, writer.value("model"))
    with pytest.raises(SandboxError, match="calling a"):
        writer.read(writer.call(layer, 1), resolve=lambda _: torch.Generator.manual_seed)
    writer = Writer()
    given = writer.function("def f(a): return a\n", "f")
    reference, none = writer.add(NodeKind.REFERENCE, writer.value("model")), writer.value(None)
    items = writer.value({"a": 1})
    parts = [given, writer.add(NodeKind.TUPLE, reference), none, none, none, none, items]
    with pytest.raises(SandboxError, match="adding items to a"):
        writer.read(writer.add(NodeKind.CALL, *parts), resolve=lambda _: model)


def test_source_of_a_class_makes_a_new_one() -> None:
    text = "@(lambda kind: ValueError)\nclass A: pass\n"
    writer = Writer()
    with pytest.raises(SandboxError, match="source of a class that makes"):
        writer.read(_class(writer, text))


@pytest.mark.parametrize("name", ["__wrapped__", "__globals__", "get!", "__array_interface__"])
def test_attributes_of_functions_have_plain_names(name: str) -> None:
    writer = Writer()
    attributes = writer.value({name: 1})
    with pytest.raises(SandboxError, match="not for code"):
        writer.read(writer.function("def f(): pass\n", "f", attributes=attributes))


def _class(writer: Writer, text: str, attributes: int | None = None) -> int:
    none, nothing = writer.value(None), writer.value(())
    return writer.add(
        NodeKind.CLASS, writer.namespace(), writer.value(piece(text, "A")), nothing, nothing, nothing,
        nothing, none if attributes is None else attributes, nothing,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["__array_interface__", "__class__", "__torch_function__", "__del__"])
def test_attributes_of_classes_and_objects_have_plain_names(name: str) -> None:
    writer = Writer()
    with pytest.raises(SandboxError, match="not for code"):
        writer.read(_class(writer, "class A: pass\n", writer.value({name: 1})))
    writer = Writer()
    kind = _class(writer, "class A: pass\n")
    nothing, none = writer.value(()), writer.value(None)
    state = writer.value({name: 1})
    with pytest.raises(SandboxError, match="not for code"):
        writer.read(writer.add(NodeKind.NEW, kind, nothing, none, state, none, none, none))


def test_objects_of_own_classes_arrive() -> None:
    writer = Writer()
    kind = _class(writer, "class A:\n    def twice(self): return self._n * 2\n")
    nothing, none = writer.value(()), writer.value(None)
    made = writer.read(
        writer.add(NodeKind.NEW, kind, nothing, none, writer.value({"_n": 4}), none, none, none)
    )
    assert made.twice() == 8


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch", "Tensor"),
        ("numpy", "ndarray"),
        ("builtins", "object"),
        ("builtins", "property"),
        ("torch", "Generator"),
    ],
)
def test_objects_of_other_classes_do_not(module: str, name: str) -> None:
    writer = Writer()
    nothing, none = writer.value(()), writer.value(None)
    with pytest.raises(DecodeError):
        writer.read(
            writer.add(NodeKind.NEW, writer.name(module, name), nothing, none, none, none, none, none)
        )


def test_members_and_methods_go_through_the_guards() -> None:
    model = NNsight(Small())
    for owner, name in (("model", "_module"), ("model", "interleaver"), ("model", "__class__")):
        writer = Writer()
        reference = writer.add(NodeKind.REFERENCE, writer.value(owner))
        with pytest.raises(SandboxError):
            writer.read(writer.add(NodeKind.MEMBER, reference, writer.value(name)), resolve=lambda _: model)
    writer = Writer()
    reference = writer.add(NodeKind.REFERENCE, writer.value("model"))
    with pytest.raises(SandboxError, match="a method that is"):
        writer.read(writer.add(NodeKind.METHOD, reference, writer.value(1)), resolve=lambda _: model)


@pytest.mark.parametrize(
    "text",
    [
        "class A:\n    while True: pass\n",
        "class A:\n    a = [0 for i in range(2000)]\n",
        "class A:\n    a = 'a' * 10**12\n",
    ],
)
def test_reading_has_a_budget_too(text: str) -> None:
    writer = Writer()
    with pytest.raises(SandboxError, match="may"):
        writer.read(_class(writer, text))


def test_a_call_is_one_of_what_may_be_called() -> None:
    writer = Writer()
    none = writer.value(None)
    call = writer.add(NodeKind.CALL, writer.name("builtins", "eval"), writer.value(("1",)), none, *[none] * 4)
    with pytest.raises(SandboxError, match="`eval`"):
        writer.read(call)


def test_a_call_while_reading_is_what_code_may_call() -> None:
    rules = restricted_policy(Budget()).rules
    assert isinstance(rules, RestrictedRules)
    with pytest.raises(SandboxError, match="calling `eval`"):
        rules.callee(eval)
    assert rules.callee(len) is len
    assert rules.callee([].append) is not None
    with pytest.raises(SandboxError, match="calling `__import__`"):
        rules.callee(__import__)


class _Thief:
    """Stands for an object of the sender's."""


def test_a_partial_of_a_module_gives_it_tensors_alone() -> None:
    model = NNsight(Small())
    writer = Writer()
    none = writer.value(None)
    reference = writer.add(NodeKind.REFERENCE, writer.value("layer1"))
    args = writer.add(NodeKind.TUPLE, reference)
    made = writer.read(
        writer.add(NodeKind.CALL, writer.name("functools", "partial"), args, none, *[none] * 4),
        resolve=lambda _: model.layer1,
    )
    assert made(torch.ones(1, 5)).shape == (1, 10)
    with pytest.raises(SandboxError, match="giving the model a"):
        made(_Thief())


@pytest.mark.parametrize("name", ["_modules", "_forward_hooks", "_forward_pre_hooks", "_parameters"])
def test_layers_hold_layers_and_weights_alone(name: str) -> None:
    model = NNsight(Small())
    writer = Writer()
    none, nothing = writer.value(None), writer.value(())
    reference = writer.add(NodeKind.REFERENCE, writer.value("layer1"))
    held = writer.add(NodeKind.DICT, writer.value("0"), reference)
    state = writer.add(NodeKind.DICT, writer.value(name), held)
    kind = writer.name("torch.nn", "Sequential")
    with pytest.raises(SandboxError, match=name):
        writer.read(
            writer.add(NodeKind.NEW, kind, nothing, none, state, none, none, none),
            resolve=lambda _: model.layer1,
        )


def test_ordinary_data_and_layers_arrive() -> None:
    value: list[Any] = [
        torch.ones(2), {"a": (1, 2.5, None)}, collections.Counter("aab"), collections.OrderedDict(a=1),
        collections.defaultdict(list, a=[1]), torch.nn.Linear(2, 3), ValueError("x"), {1, 2}, range(3),
        torch.float32, collections.deque([1]), torch.relu, len, torch.nn.functional.gelu,
    ]  # fmt: skip
    found = decode(encode(value), policy=restricted_policy(Budget()))
    assert torch.equal(found[0], value[0])
    assert found[1:5] == value[1:5]
    assert torch.equal(found[5](torch.ones(2)), value[5](torch.ones(2)))
    assert repr(found[6]) == repr(value[6])
    assert found[7:11] == value[7:11]
    assert torch.equal(found[11](torch.tensor([-1.0, 1.0])), torch.tensor([0.0, 1.0]))
    assert found[12]("abc") == 3


@pytest.mark.parametrize(
    "expression",
    ["+".join(["a"] * 20_000), "a" + ".T" * 20_000, "-" * 20_000 + "a", "a" + "[0]" * 20_000, "a" * 10],
)
def test_code_may_be_nested_too_deeply(expression: str) -> None:
    for depth in (len(expression), 900, 3000):
        writer = Writer()
        text = f"def f(a): return {expression[:depth].rstrip('+-.T[0') or 'a'}\n"
        try:
            writer.read(writer.function(text, "f"))
        except DecodeError:
            continue


def with_a_block(loss: Any, model: Any) -> Any:
    found = []
    with loss.backward():
        found.append(model._module)
    return found


def test_blocks_in_functions_that_came_along_are_as_restricted() -> None:
    code = "got = f(model.layer1.output.requires_grad_().sum(), model)"
    with pytest.raises(SandboxError, match="attribute `_module`"):
        run(message_of(code, f=with_a_block), NNsight(Small()), restricted_policy(Budget()), torch.ones(1, 5))


def test_the_text_of_a_block_is_not_that_of_another_piece_at_its_place() -> None:
    harmless = "def f(loss, out):\n    with loss.backward():\n        out.append(1)\n        out.append(2)\n"
    evil = "def f(loss, out):\n    '''\n        out.append(out.__class__)\n    '''\n"
    writer = Writer()
    function = writer.function(harmless, "f")
    other = writer.function(evil, "f")
    first, second = writer.read(writer.add(NodeKind.TUPLE, function, other))
    assert second is not first
    out: list[Any] = []
    first(torch.ones(1, requires_grad=True).sum(), out)
    assert out == [1, 2]
