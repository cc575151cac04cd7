"""Random traces whose invokes use the same names, and what they may read, by running them one by one.

``Program`` is a function's text. Traced, each of its reads goes into a list. Run as plain Python, where a
trace is no more than a block, invokes come one after the other: that says which value each read is to give,
and whose. ``check`` compares: what an invoke has assigned itself it reads exactly so; what it has not is what
the invoke before it that is the source has for it, now or later, or a ``NameError``.
"""

from __future__ import annotations

import contextlib
import linecache
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from nnsight_engine import save

NAMES = ("a", "b", "layer", "i")
MISSING = "nothing"
_SHARED = ("True", "None", "1", "(1, 2)")
"""Values that are the same object wherever they are written."""

_PLACES = tuple(f"model[{number}]" for number in range(6))

Read = tuple[str, int, Any]


class Program:
    """One random program.

    Args:
        seed: Says which.
        places: The texts of places of the model, in the order in which it reaches them.
        sent: Whether it is to be sent elsewhere, where its functions and classes would not be found.
        local: Whether parts of the blocks stand under ``tracer.local()``.
    """

    def __init__(
        self,
        seed: int,
        places: Sequence[str] = _PLACES,
        *,
        sent: bool = False,
        local: bool = False,
    ) -> None:
        self._random = random.Random(seed)
        self._places, self._sent, self._local = places, sent, local
        self._count = 0
        self._who = "outer"
        self._own: Sequence[str] = ()
        self._function_name = ""
        lines = ["def run(model, given, how):", "    turn = 0"]
        lines += self._indented(1, [line for _ in range(2) for line in self._assigned()])
        lines += ["    with model.trace(**how) as tracer:", "        reads = save([])"]
        for number in range(self._random.randint(2, 3)):
            kind = self._invoke_in_function if self._random.random() < 0.4 else self._invoke
            lines += self._indented(2, kind(number))
        self.lines = [*lines, "    return reads", f"    {' = '.join(NAMES)} = None"]  # for ``nonlocal``
        self.name = f"<program {seed} {places[0]} {local}>"

    def traced(self, model: Any, given: Any, **how: Any) -> list[Read]:
        """Run it traced; returns what was read, as place in the text, turn of the loop and value.

        Args:
            model: What is traced.
            given: Every invoke's input.
            **how: Arguments of the trace.
        """
        return self._function("")(model, given, how)

    def check(self, reads: list[Read]) -> int:
        """Compare what was read with the program run one by one; returns how many values came from others."""
        events: list[tuple[Any, ...]] = []
        self._function("in turn", events)(_Place("model"), None, {})
        found = defaultdict(list)
        for key, turn, value in reads:
            found[key, turn].append(value)
        sources: dict[str, tuple[str, int]] = {}
        had: dict[tuple[str, str, int], list[Any]] = defaultdict(list)
        for kind, name, who, turn, value, _ in events:
            if kind == "put":
                had[name, who, turn].append(value)
        num_others = 0
        for kind, name, who, turn, value, key in events:
            if kind == "put":
                sources[name] = (who, turn)
                continue
            got, source = found[key, turn].pop(0), sources.get(name)
            allowed = [value]
            if source is None or (source[0] == "outer" and value == MISSING):  # then it may be a later one's
                allowed += [one for (of, _, _), values in had.items() if of == name for one in values]
            elif source != (who, turn):
                allowed.append(MISSING)
                allowed += had[name, *source] if source[0] != "outer" else []
                num_others += got != MISSING
            assert got in allowed, f"{key} in turn {turn} read {got!r}, not one of {allowed}\n{self}"
        assert not any(found.values())
        return num_others

    def __str__(self) -> str:
        """Return its text."""
        return "\n".join(line for line in self.lines if not line.lstrip().startswith("put("))

    def _function(self, kind: str, events: list[tuple[Any, ...]] | None = None) -> Callable[..., list[Read]]:
        lines = self.lines if events is not None else str(self).split("\n")
        filename, text = f"{self.name}{kind}", "\n".join(lines) + "\n"
        linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
        variables: dict[str, Any] = {"save": save, "contextlib": contextlib, "__name__": "programs"}
        if events is not None:
            reads = _Reads(events)
            variables |= {"save": lambda _: reads, "put": lambda *event: events.append(("put", *event, ""))}
        exec(compile(text, filename, "exec"), variables)
        function: Callable[..., list[Read]] = variables["run"]
        return function

    # Statements.

    def _invoke(self, number: int) -> list[str]:
        likely = 0.8 if self._function_name else 0.4
        loops = self._random.random() < likely
        before = self._assigned() if self._random.random() < likely else []
        self._who, self._at = f"invoke{number}" + (":{call}" if self._function_name else ""), 0
        body = [line for _ in range(self._random.randint(3, 7)) for line in self._statement()]
        self._who = "outer"
        block = [*before, "with tracer.invoke(given):", *self._indented(1, [*body, *self._waits()])]
        return ["for turn in range(2):", *self._indented(1, block)] if loops else ["turn = 0", *block]

    def _invoke_in_function(self, number: int) -> list[str]:
        """Return an invoke in a function of the block's, whose names are its own or the block's."""
        self._own = self._random.sample(NAMES, self._random.randint(1, len(NAMES)))
        self._function_name = f"add{number}"
        outer = [name for name in NAMES if name not in self._own]
        lines = [*([f"nonlocal {', '.join(outer)}"] if outer else []), "turn = 0"]
        lines += self._assigned() if self._random.random() < 0.4 else []
        lines += self._invoke(number)
        lines += self._assigned() if self._random.random() < 0.4 else []
        lines += [
            "if not tracer:",
            f"    {' = '.join(self._own)} = None",
        ]  # they are the function's in any case
        self._own, self._function_name = (), ""
        calls = [f"add{number}({call})" for call in range(self._random.randint(1, 2))]
        return [f"def add{number}(call):", *self._indented(1, lines), *calls]

    def _variable(self, name: str) -> str:
        """Return the text that identifies a variable among others of its name, as a part of an f-string."""
        return f"{name}@{self._function_name}:{{call}}" if name in self._own else name

    def _statement(self) -> list[str]:
        kinds = [self._waits, self._read, self._read, self._assigned, self._assigned, self._loop]
        found = self._random.choice(kinds)()
        if self._random.random() < 0.15:
            found = [f"if {self._random.choice(('True', 'False'))} or not tracer:", *self._indented(1, found)]
        if (
            self._local
            and self._random.random() < 0.3
            and not any(".output" in line or "reads" in line for line in found)
        ):
            found = ["with tracer.local():", *self._indented(1, found)]
        return found

    def _waits(self) -> list[str]:
        self._at += self._random.randint(1, 2)
        if self._at >= len(self._places):
            return ["pass"]
        return [f"_ = {self._places[self._at]}.output"]

    def _loop(self) -> list[str]:
        """Return the usual loop over modules."""
        name, first, self._at = self._name(), self._at + 1, self._at + 2
        if self._at >= len(self._places):
            return ["pass"]
        items = ", ".join(self._places[number] for number in (first, self._at))
        body = [self._put(name), f"_ = {name}.output", *self._read_of(name)]
        return [f"for {name} in ({items}):", *self._indented(1, body)]

    def _read(self) -> list[str]:
        return self._read_of(self._name())

    def _read_of(self, name: str) -> list[str]:
        self._count += 1
        shown = f'getattr({name}, "path", getattr({name}, "__name__", {name}))'
        place = f'f"{self._who} {self._variable(name)} {self._count}", turn'
        missing = [f"    reads.append(({place}, {MISSING!r}))"]
        return ["try:", f"    reads.append(({place}, {shown}))", "except NameError:", *missing]

    def _name(self) -> str:
        return self._random.choice(NAMES)

    def _value(self) -> str:
        self._count += 1
        return self._random.choice((*_SHARED, f'(f"{self._who}", {self._count}, turn)', self._places[0]))

    def _put(self, name: str, value: str | None = None) -> str:
        shown = value or f'getattr({name}, "path", getattr({name}, "__name__", {name}))'
        return f'put(f"{self._variable(name)}", f"{self._who}", turn, {shown})'

    def _assigned(self) -> list[str]:
        """Return one of the ways to assign a name."""
        name, other, value = self._name(), self._name(), self._value()
        put, gone = self._put(name), self._put(name, repr(MISSING))
        ways = [
            [f"{name} = {value}", put],
            [f"{name} = {value}", put],
            [f"{name}: object = {value}", put],
            [f"({other}, {name}) = (1, {value})", self._put(other), put],
            [f"for {name} in (2, {value}):", "    pass", f"    {put}"],
            [f"with contextlib.nullcontext({value}) as {name}:", "    pass", f"    {put}"],
            [f"({name} := {value})", put],
            [f"[({name} := one) for one in (3, {value})]", put],
            [f"{name} = 4", put, f"{name} += 0", put],
            [f"{name} = {value}", put, f"del {name}", gone],
            [f"import math as {name}", put],
            ["try:", "    raise ValueError(5)", f"except ValueError as {name}:", "    pass", gone],
            [f"match {value}:", f"    case {name}:", "        pass", f"        {put}"],
        ]
        if self._function_name and name not in self._own:  # Python has no annotations for nonlocal names
            ways = [way for way in ways if not way[0].startswith(f"{name}:")]
        if not self._sent:
            ways += [[f"def {name}() -> None: ...", put], [f"class {name}: ...", put]]
        if self._who != "outer":
            ways.append(["def assign():", f"    nonlocal {name}", f"    {name} = {value}", "assign()", put])
        return self._random.choice(ways)

    def _indented(self, depth: int, lines: list[str]) -> list[str]:
        return ["    " * depth + line for line in lines]


class _Place:
    """Stands for a model that is not run: its places have paths and nothing else."""

    output = None

    def __init__(self, path: str) -> None:
        self.path = path

    def __getitem__(self, key: int) -> _Place:
        return _Place(f"{self.path}.{key}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Place(f"{self.path}.{name}")

    def trace(self, *_: Any, **__: Any) -> contextlib.nullcontext[_Place]:
        return contextlib.nullcontext(self)

    def invoke(self, *_: Any, **__: Any) -> contextlib.nullcontext[_Place]:
        return contextlib.nullcontext(self)

    local = invoke


class _Reads:
    """Notes reads among the events of the program."""

    def __init__(self, events: list[tuple[Any, ...]]) -> None:
        self._events = events

    def append(self, read: Read) -> None:
        key, turn, value = read
        who, name, _ = key.split()
        self._events.append(("read", name, who, turn, value, key))
