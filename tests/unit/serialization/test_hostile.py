"""Bytes from anyone: a value, or ``DecodeError``; never another error, never room or time without end."""

from __future__ import annotations

import collections
import datetime
import decimal
import importlib
import random
import struct
import subprocess
import sys
import tracemalloc
import uuid
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import zstandard

from nnsight_engine.serialization import (
    DATA_ONLY,
    TRUSTED,
    DecodeError,
    MessageLimits,
    Policy,
    decode,
    encode,
)
from nnsight_engine.serialization.message import MAGIC, VERSION, NodeKind
from tests.unit.serialization.messages import Node, message

HEAD = struct.Struct("<4sBBBxIIIIIIQQ")


def refused(data: bytes, match: str = "", **options: Any) -> None:
    with pytest.raises(DecodeError, match=match):
        decode(data, **options)


class Thing:
    def __init__(self) -> None:
        self.data = [1, "two", {3: (4.0, b"5")}]


def function(value: int) -> int:
    return value + 1


@pytest.mark.parametrize("trusted", [False, True])
def test_broken_messages_are_decode_errors(trusted: bool) -> None:
    values: list[Any] = [
        [1, 2.5, "text", {"a": (None, {1, 2})}, torch.ones(2), torch.Size([1])],
        {"x": [range(3), slice(1)]},
    ]
    if trusted:  # source that was changed may do anything, so names are all that this policy allows
        values += [Thing, [Thing(), function]]
    policy = Policy(lambda module, _name: False, allow_source=True) if trusted else DATA_ONLY
    generator = random.Random(7)
    for data in [*map(encode, values), encode(values[0], compress=True)]:
        for _ in range(400):
            broken = bytearray(data)
            for _ in range(generator.randrange(1, 4)):
                broken[generator.randrange(len(broken))] = generator.randrange(256)
            cut = broken[: generator.randrange(len(broken))] if generator.random() < 0.2 else broken
            try:
                decode(cut, policy=policy)
            except DecodeError:
                continue


def test_random_tables_are_values_or_decode_errors() -> None:
    generator = random.Random(11)
    data_kinds = [kind for kind in NodeKind if kind < NodeKind.NAME]
    scalars = {
        NodeKind.INT: 3, NodeKind.FLOAT: 0.5, NodeKind.STR: "float32", NodeKind.DTYPE: "float32",
        NodeKind.DEVICE: "cpu",
    }  # fmt: skip
    for _ in range(3000):
        size = generator.randrange(1, 12)
        nodes = []
        for _ in range(size):
            kind = generator.choice(data_kinds)
            arity = generator.choice([0, 0, 1, 2, 3, 7])
            children = [generator.randrange(size) for _ in range(arity)]
            nodes.append((kind, children, scalars.get(kind, b"ab")))
        try:
            decode(message(*nodes))
        except DecodeError:
            continue


def test_what_is_no_message_and_what_is_of_another_version() -> None:
    refused(b"", "no message")
    refused(b"\x80\x04}.", "no message")
    data = bytearray(encode(1))
    data[4] = VERSION + 1
    refused(bytes(data), "this side is older")
    data[4] = VERSION - 1
    refused(bytes(data), "the sender is older")
    data[4:6] = bytes([VERSION, 1])
    refused(bytes(data), "flags 0x1")


def test_sizes_are_believed_only_if_they_fit() -> None:
    refused(HEAD.pack(MAGIC, VERSION, 0, 0, 2**32 - 1, 0, 0, 0, 0, 0, 0, 0), "other sizes")
    refused(encode([1] * 100), "may have", limits=MessageLimits(max_bytes=10))
    refused(encode(list(range(100))), "101 objects", limits=MessageLimits(max_nodes=10))
    refused(encode("x" * 100), "a string", limits=MessageLimits(max_text_bytes=10))


def test_a_compressed_message_unpacks_to_what_it_says_or_not_at_all() -> None:
    bomb = encode(torch.zeros(16 * 2**20, dtype=torch.uint8), compress=True)
    assert len(bomb) < 100_000
    stream = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(16 * 2**20))
    tracemalloc.start()
    try:
        refused(bomb, "may to", limits=MessageLimits(max_bytes=2**20))
        # One that is smaller than its frame: neither the frame's own size nor its content is believed.
        head = bytearray(encode([0], compress=True)[: HEAD.size])
        refused(bytes(head) + bomb[HEAD.size :], "another size")
        refused(bytes(head) + stream, "cannot be unpacked|other sizes")
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    refused(bomb[:-1], "cannot be unpacked")
    refused(bomb + b"more", "broken")
    refused(bomb[: HEAD.size] + b"nothing like it", "cannot be unpacked")


def test_a_tensor_of_any_claimed_size_takes_no_room() -> None:
    def tensor(*shape: int, name: bool = True) -> bytes:
        sizes: list[Node] = [(NodeKind.INT, [], size) for size in shape]
        return message(
            (NodeKind.TENSOR, [1 if name else 5, 2, 3, 4, 6, 7, 5], None),
            (NodeKind.STR, [], "0"),
            (NodeKind.DTYPE, [], "float32"),
            (NodeKind.TUPLE, list(range(8, 8 + len(sizes))), None),
            (NodeKind.DEVICE, [], "cpu"),
            (NodeKind.NONE, [], None),
            (NodeKind.FALSE, [], None),
            (NodeKind.STR, [], "tensor"),
            *sizes,
            tensors={"0": torch.ones(2)},
        )

    assert decode(tensor(2)).tolist() == [1, 1]
    tracemalloc.start()
    refused(tensor(2**40), "bytes, not 8")
    refused(tensor(2**61, 2**61), "bytes, not 8")
    refused(tensor(-1, -2), "impossible")
    refused(tensor(2**40, name=False), "no values")
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_cycles_that_nothing_can_be_made_from() -> None:
    refused(message((NodeKind.TUPLE, [0], None)), "need each other")
    refused(message((NodeKind.TUPLE, [1], None), (NodeKind.FROZENSET, [0], None)), "need each other")
    refused(message((NodeKind.LIST, [1], None), (NodeKind.TUPLE, [1, 0], None)), "need each other")


def test_keys_that_would_hash_forever() -> None:
    deep: Any = 1
    for _ in range(100_000):
        deep = (deep,)
    node = decode(encode([deep]))  # as a value it is fine
    assert node
    nodes: list[Node] = [(NodeKind.SET, [1], None)]
    nodes += [(NodeKind.TUPLE, [at + 2], None) for at in range(100_000)]
    refused(message(*nodes, (NodeKind.INT, [], 1)), "tuples deep")
    doubling: list[Node] = [(NodeKind.TUPLE, [at + 2] * 2, None) for at in range(100)]
    refused(message((NodeKind.SET, [1], None), *doubling, (NodeKind.INT, [], 1)), "steps")
    huge: Node = (NodeKind.BIG_INT, [], b"\1" * 10_000_000)
    refused(message((NodeKind.FROZENSET, [1] * 1000, None), huge), "steps")
    colliding = [at * sys.hash_info.modulus for at in range(5000)]
    refused(encode(dict.fromkeys(colliding[:1500])), "same hash")
    refused(encode(set(colliding[:1500])), "same hash")
    refused(message((NodeKind.SET, [1], None), (NodeKind.LIST, [], None)), "unhashable")


def test_long_chains_that_would_be_freed_by_recursion() -> None:
    size = 100_000
    slices: list[Node] = [(NodeKind.SLICE, [at + 1] * 3, None) for at in range(size)]
    refused(message(*slices, (NodeKind.NONE, [], None)), "others deep")


@pytest.mark.parametrize(
    "name",
    [
        "os:system",
        "builtins:eval",
        "builtins:exec",
        "subprocess:Popen",
        "torch:load",
        "tempfile:NamedTemporaryFile",
    ],
)
def test_results_import_nothing_but_data(name: str) -> None:
    refused(message((NodeKind.NAME, [], name)), "does not take")


def test_results_call_no_function_and_no_class_that_makes_room() -> None:
    call = (NodeKind.CALL, [1, 2, 4, 4, 4, 4, 4], None)
    rest: list[Node] = [
        (NodeKind.TUPLE, [3], None),
        (NodeKind.INT, [], 2**40),
        (NodeKind.NONE, [], None),
    ]
    refused(message(call, (NodeKind.NAME, [], "builtins:bytes"), *rest), "asks to call")
    refused(message(call, (NodeKind.NAME, [], "torch:zeros"), *rest), "does not take")
    refused(
        message((NodeKind.ENUM_MEMBER, [1, 3], None), (NodeKind.NAME, [], "builtins:bytes"), *rest), "no enum"
    )
    walk: list[Node] = [
        (NodeKind.TUPLE, [3], None),
        (NodeKind.RANGE, [5, 6, 5], None),
        rest[2],
    ]
    walk += [(NodeKind.INT, [], 1), (NodeKind.INT, [], 2**40)]
    refused(message(call, (NodeKind.NAME, [], "collections:Counter"), *walk), "never made from")
    new = (NodeKind.NEW, call[1], None)
    refused(message(new, (NodeKind.NAME, [], "builtins:bytes"), *rest), "asks to call")
    refused(message(new, (NodeKind.NAME, [], "collections:OrderedDict.fromkeys"), *rest), "does not take")
    for wanted in (call, new):  # the class may be mentioned alone; made so, it is memory of a stranger's size
        refused(message(wanted, (NodeKind.NAME, [], "torch:Tensor"), *rest), "asks to call")
    assert decode(encode(torch.Tensor), policy=DATA_ONLY) is torch.Tensor


def test_results_hold_no_code() -> None:
    refused(encode(function), "holds code")
    refused(encode(Thing()), "holds code")
    refused(encode(len), "does not take")
    refused(encode(torch), "does not take")
    refused(encode(torch.nn.Linear(1, 1)), "does not take")


def test_a_client_may_allow_its_own_classes() -> None:
    arrived = decode(encode(Thing()), policy=TRUSTED)  # there, where the class came as source
    back = encode(arrived)
    refused(back, "does not take")


def test_a_policy_is_asked_before_anything_is_imported() -> None:
    asked: list[tuple[str, str]] = []

    def may_import(module: str, name: str) -> bool:
        asked.append((module, name))
        return False

    refused(
        message((NodeKind.NAME, [], "antigravity:x")),
        "antigravity",
        policy=Policy(may_import, allow_source=True),
    )
    refused(message((NodeKind.MODULE, [], "this")), "this", policy=Policy(may_import, allow_source=True))
    assert asked == [("antigravity", "x"), ("this", "")]
    assert "antigravity" not in sys.modules


def test_what_is_not_installed_here_says_what_to_do() -> None:
    refused(message((NodeKind.NAME, [], "no_such_package:thing")), "register_by_value", policy=TRUSTED)
    refused(message((NodeKind.NAME, [], "math:nothing")), "math.nothing", policy=TRUSTED)


def test_data_names_only_classes_of_the_module_itself() -> None:
    """Modules of models import others, through which a dotted name would lead to anything in the process."""
    modules = ["transformers.cache_utils", "transformers.modeling_outputs", "torch.return_types"]
    modules += ["transformers.models.llama.modeling_llama", "transformers.generation.utils"]
    for module in modules:
        found = importlib.import_module(module)
        for name, value in list(vars(found).items()):
            data = message((NodeKind.NAME, [], f"{module}:{name}"))
            try:
                taken = decode(data)
            except DecodeError:
                continue
            assert isinstance(taken, type)
            assert (taken.__module__, taken.__qualname__) == (module, name)
            assert not issubclass(taken, torch.nn.Module)
            for inner in dir(value):
                refused(message((NodeKind.NAME, [], f"{module}:{name}.{inner}")), "does not take")
        for imported in [name for name, value in vars(found).items() if isinstance(value, ModuleType)]:
            refused(message((NodeKind.NAME, [], f"{module}:{imported}.Tensor")), "does not take")


def test_data_runs_no_command(tmp_path: Path) -> None:
    walked, queue = set[int](), [(importlib.import_module("transformers.cache_utils"), "")]
    while True:
        module, path = queue.pop(0)
        if module is subprocess:
            break
        if id(module) not in walked:
            walked.add(id(module))
            inner = [(name, value) for name, value in vars(module).items() if isinstance(value, ModuleType)]
            queue += [(value, f"{path}{name}.") for name, value in inner]
    name = f"transformers.cache_utils:{path}Popen"
    data = message(
        (NodeKind.CALL, [1, 2, 3, 3, 3, 3, 3], None), (NodeKind.NAME, [], name), (NodeKind.TUPLE, [4], None),
        (NodeKind.NONE, [], None), (NodeKind.LIST, [5, 6], None), (NodeKind.STR, [], "touch"),
        (NodeKind.STR, [], str(tmp_path / "ran")),
    )  # fmt: skip
    refused(data, "does not take")
    assert not list(tmp_path.iterdir())


NONE: Node = (NodeKind.NONE, [], None)


def made(name: str, args: list[Node], *more: Node, kind: NodeKind = NodeKind.CALL, filled: int = 3) -> bytes:
    """Return a message of one object; ``filled`` is the node of its items in pairs, state and slots."""
    first = 4
    parts = [1, 2, 3, 3, 3, 3, 3]
    if filled != 3:
        parts[3] = filled
    numbers = list(range(first, first + len(args)))
    root: Node = (kind, parts, None)
    return message(root, (NodeKind.NAME, [], name), (NodeKind.TUPLE, numbers, None), NONE, *args, *more)


def deep_tuple(first: int, depth: int = 2000) -> list[Node]:
    """Return nodes of tuples within each other, the outermost being node ``first``."""
    inner: list[Node] = [(NodeKind.TUPLE, [first + at + 1], None) for at in range(depth)]
    return [*inner, (NodeKind.INT, [], 1)]


def test_no_object_of_data_hashes_what_is_deep() -> None:
    deep = deep_tuple(5)
    refused(made("collections:Counter", [(NodeKind.LIST, [5], None)], *deep), "never made from")
    refused(made("collections:OrderedDict", [(NodeKind.LIST, [5], None)], *deep), "never made from")
    member: Node = (NodeKind.ENUM_MEMBER, [1, 2], None)
    refused(message(member, (NodeKind.NAME, [], "uuid:SafeUUID"), *deep_tuple(2)), "a tuple as its value")
    refused(made("uuid:SafeUUID", [(NodeKind.TUPLE, [3], None)]), "never made from")
    state: list[Node] = [(NodeKind.DICT, [5, 6], None), (NodeKind.STR, [], "int"), *deep_tuple(6)]
    refused(made("uuid:UUID", [], *state, kind=NodeKind.NEW, filled=4), "not one number")
    state[1] = (NodeKind.STR, [], "_cached_cparts")
    refused(made("pathlib:PosixPath", [], *state, filled=4), "which has none")


def test_no_objects_of_data_are_freed_by_recursion() -> None:
    size = 2000
    refused(message(*((NodeKind.CELL, [at + 1], None) for at in range(size)), NONE), "holds code")
    nodes: list[Node] = [(NodeKind.LIST, [3], None), (NodeKind.NAME, [], "torch.return_types:max"), NONE]
    for at in range(3, 3 + 3 * size, 3):
        nodes += [(NodeKind.CALL, [1, at + 1, *[2] * 5], None), (NodeKind.TUPLE, [at + 2], None)]
        nodes.append((NodeKind.LIST, [at + 3, 2], None))
    refused(message(*nodes, NONE), "never made from")


def test_no_object_of_data_takes_hours() -> None:
    huge: Node = (NodeKind.BIG_INT, [], b"\1" * 10_000_000)
    refused(made("decimal:Decimal", [huge]), "never made from")
    refused(message((NodeKind.FROZENSET, [1] * 1000, None), (NodeKind.RANGE, [2, 2, 2], None), huge), "steps")
    digits: Node = (NodeKind.STR, [], "9" * 10_000_000)
    call: Node = (NodeKind.CALL, [2, 3, *[5] * 5], None)
    name: Node = (NodeKind.NAME, [], "decimal:Decimal")
    keys: Node = (NodeKind.FROZENSET, [1] * 60, None)
    refused(message(keys, call, name, (NodeKind.TUPLE, [4], None), digits, NONE), "steps")
    numbers: list[Node] = [
        (NodeKind.BIG_INT, [], (at * sys.hash_info.modulus).to_bytes(20, "little")) for at in range(30_000)
    ]
    listed: Node = (NodeKind.LIST, list(range(5, 5 + len(numbers))), None)
    refused(made("collections:Counter", [listed], *numbers), "never made from")


@pytest.mark.parametrize("place", [3, 6])
def test_objects_of_data_do_not_copy_one_container_many_times(place: int) -> None:
    """A message of a megabyte would otherwise take gigabytes."""
    name = "types:SimpleNamespace" if place == 3 else "collections:OrderedDict"
    size = 20_000
    call: Node = (NodeKind.CALL, [1, 2, *[4 if at == place else 3 for at in range(2, 7)]], None)
    keys: list[Node] = [(NodeKind.STR, [], f"k{at}") for at in range(size)]
    shared: Node = (NodeKind.DICT, [node for at in range(size) for node in (5 + at, 3)], None)
    root: Node = (NodeKind.LIST, list(range(5 + size, 5 + 2 * size)), None)
    rest: list[Node] = [(NodeKind.NAME, [], name), (NodeKind.TUPLE, [], None), NONE, shared, *keys]
    refused(message(root, *rest, *[call] * size), "copy more than was sent")


def test_state_of_data_sets_no_class() -> None:
    state: list[Node] = [(NodeKind.DICT, [5, 6], None), (NodeKind.STR, [], "__class__")]
    state.append((NodeKind.NAME, [], "transformers.cache_utils:EncoderDecoderCache"))
    new = NodeKind.NEW
    refused(made("transformers.cache_utils:DynamicCache", [], *state, kind=new, filled=4), "'__class__'")
    state[2] = (NodeKind.NAME, [], "transformers.modeling_outputs:BaseModelOutputWithPast")
    refused(made("transformers.modeling_outputs:BaseModelOutput", state[:1], *state[1:]), "makes a")


def test_data_imports_no_module_that_defines_no_output() -> None:
    """Conversion scripts and the like run programs when they are imported."""
    before = set(sys.modules)
    for module in (
        "llama.convert_llama_weights_to_hf",
        "llama.tokenization.x",
        "llama",
        "llama.configuration_llama",
    ):
        refused(message((NodeKind.NAME, [], f"transformers.models.{module}:AnyOutput")), "does not take")
    assert not {name for name in set(sys.modules) - before if name.startswith("transformers.models.llama")}


def test_a_module_that_exits_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "module_that_exits.py").write_text("raise SystemExit(3)")
    monkeypatch.syspath_prepend(tmp_path)
    refused(message((NodeKind.NAME, [], "module_that_exits:x")), "cannot be imported", policy=TRUSTED)


def test_data_of_the_standard_library_arrives() -> None:
    here = datetime.timezone(datetime.timedelta(hours=1), "here")
    attributes = collections.OrderedDict(a=1)
    attributes.note = "kept"  # type: ignore[attr-defined] # instances have attributes
    values: list[Any] = [
        datetime.date(2026, 1, 2), datetime.datetime(2026, 1, 2, tzinfo=here), datetime.time(1, tzinfo=here),
        datetime.timedelta(1, 2, 3), here, decimal.Decimal("1.50"), Path("/a/b"), uuid.uuid4(),
        attributes, collections.defaultdict(list, a=[1]), collections.defaultdict(None, a=1),
        collections.Counter("abca"), SimpleNamespace(a=1), uuid.SafeUUID.safe,
    ]  # fmt: skip
    assert decode(encode(values)) == values
    assert decode(encode(attributes)).note == "kept"
    hashable = [value for value in values if type(value).__hash__ is not None and value != values[12]]
    assert decode(encode(set(hashable))) == set(hashable)
    highest = decode(encode(torch.max(torch.eye(2), 0)))
    assert type(highest) is torch.return_types.max
    assert highest.indices.tolist() == [0, 1]
    many = [Path(f"/a-folder-with-a-long-name/{'x' * 80}/{at}") for at in range(1000)]
    assert decode(encode(many)) == many
