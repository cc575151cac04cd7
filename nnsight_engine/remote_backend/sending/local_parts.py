"""Client side of ``with tracer.local():``, parts of a block that run here while the rest runs on a server.

The engine can request only these statements and no other code: it identifies one by its position. A body runs
on variables of its own, which last for the trace. Variables that nothing else mentions stay here, and need
not be serializable. A value that is returned unchanged is sent as a reference, so that it remains the
engine's own object. ``docs/remote.md`` specifies the format of the messages.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
from collections.abc import Mapping, Sequence, Set
from types import CellType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import msgspec
import torch
from torch.overrides import TorchFunctionMode

from nnsight_engine.core.closure_cells import UNBOUND, Assignments, content, copied
from nnsight_engine.core.saves import SAVES
from nnsight_engine.core.trees import map_tensors
from nnsight_engine.interleaving.shared_variables import exchanges
from nnsight_engine.remote_backend.errors import LocalBlockError
from nnsight_engine.serialization import DecodeError, decode, encode, encode_error
from nnsight_engine.tracing.block_names import mangled, names_in
from nnsight_engine.tracing.blocks import Block, Nested, compile_block
from nnsight_engine.tracing.tracer import Info, Tracer, compiled

if TYPE_CHECKING:
    from nnsight_engine.remote_backend.sending.outgoing_trace import Dialect
    from nnsight_engine.remote_backend.values.outcomes import Outcome, SentPart

GIVEN: Final = "given"
"""First element of the reference to a value that the engine sent."""

T = TypeVar("T")
Place = tuple[int, int, int]
"""Position of a statement: line, column, and the number of its items from this one to the last."""


class PartRequest(msgspec.Struct, kw_only=True):
    """A request to run a part of a block.

    Attributes:
        attempt: Unguessable id of the engine's run of the trace; a restarted server uses another one.
        turn: Number of requests before this one.
        names: The variables that its body shares with the block.
        values: Values of the variables that the body reads, as far as the engine has them.
    """

    attempt: str
    turn: int
    block: int
    place: Place
    names: list[str]
    values: dict[str, Any]


class PartResult(msgspec.Struct, kw_only=True):
    """The result of a part; gradients would have to pass through ``computed``, ``deleted`` are unbound."""

    values: dict[str, Any] = {}
    saved: list[str] = []
    computed: list[str] = []
    deleted: list[str] = []
    error: dict[str, Any] | None = None


def plain(message: PartRequest | PartResult) -> dict[str, Any]:
    return msgspec.structs.asdict(message)


def read_part(value: Any, kind: type[T]) -> T:
    """Return a message about a part, from decoded data; raise a ``DecodeError`` if it is none."""
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise DecodeError(f"this is no message about tracer.local(): {error}") from error


def place_of(nested: Nested) -> Place:
    """Return the position of a statement, independent of the nesting level from which it was reached."""
    return (nested.node.lineno, nested.node.col_offset, len(nested.node.items) - nested.item)


def names_read(body: Sequence[ast.stmt], class_name: str | None) -> frozenset[str]:
    """Return the variables that a body may read; those that it only assigns are left out."""
    stored, read = set[str](), set[str]()
    for node in (node for statement in body for node in ast.walk(statement)):
        match node:
            case ast.Name(id=name, ctx=ast.Store()):
                stored.add(name)
            case ast.Name(id=name, ctx=ast.Load()) | ast.AugAssign(target=ast.Name(id=name)):
                read.add(name)
    return mangled(frozenset(names_in(body) - (stored - read)), class_name)


_Found = Mapping[Place, Nested]


def local_parts(parts: Sequence[SentPart], tracer: Tracer, dialect: Dialect) -> LocalParts | None:
    """Return the parts of a trace's blocks that run here; None if there are none."""
    statements = [_statements(part, tracer) for part in parts]
    return LocalParts(parts, statements, dialect) if any(statements) else None


class _Answer(NamedTuple):
    """The response to a request, by its attempt and turn; empty while the part runs."""

    attempt: str
    turn: int
    data: bytes


class LocalParts:
    """The parts of one trace that run here; ``local_names`` are the names that only these bodies mention."""

    def __init__(self, parts: Sequence[SentPart], statements: Sequence[_Found], dialect: Dialect) -> None:
        """Find the names that only these bodies mention, and give the bodies cells of their own."""
        self._statements = statements
        self._dialect = dialect
        self._infos = [part.info for part in parts]
        inside, outside = set[str](), set[str]()
        for part, nested in zip(parts, statements, strict=True):
            class_name = part.info.block.context.class_name
            inside |= mangled(
                names_in([node for statement in nested.values() for node in statement.body]), class_name
            )
            outside |= mangled(names_in(_without(part.info.block.origin.body, nested)), class_name)
        self.local_names = frozenset(inside - outside)
        self._cells = [copied(part.cells) for part in parts]
        self._assignments = [Assignments(cells) for cells in self._cells]
        self._exchanges = exchanges(
            [
                _LocalVariables(part, assignments, self.local_names)
                for part, assignments in zip(parts, self._assignments, strict=True)
            ]
        )
        self._blocks: dict[tuple[int, Place, frozenset[str]], Block] = {}
        self._saved: list[dict[str, Any]] = [{} for _ in parts]
        self._flows: list[dict[str, Any]] = [{} for _ in parts]
        self._error: BaseException | None = None
        self._last_answer: _Answer | None = None

    def run(self, data: bytes | bytearray | memoryview) -> bytes:
        """Run the part that the engine requests, and return the response, which reports any error."""
        SAVES.enter()
        try:
            return self._run(data)
        except Exception as error:  # noqa: BLE001 - the engine raises it in the block, then the client here
            self._error = error
            answer = encode(plain(PartResult(error=encode_error(error))))
            if self._last_answer is not None:
                self._last_answer = self._last_answer._replace(data=answer)
            return answer
        finally:
            SAVES.exit()

    def completed(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """Return the blocks' outcomes, supplemented with values saved here and the original error."""
        return [
            dataclasses.replace(
                outcome,
                saves={**outcome.saves, **self._saved[outcome.index]},
                flows={**outcome.flows, **self._flows[outcome.index]},
                error=self._error if self._is_own(outcome.error) else outcome.error,
            )
            if outcome.index < len(self._infos)
            else outcome
            for outcome in outcomes
        ]

    def _is_own(self, error: BaseException | None) -> bool:
        """Return whether a server's error is the one that a part raised here, which the server sent back."""
        own_error = self._error
        if own_error is None or error is None:
            return False
        return (type(own_error).__qualname__, str(own_error)) == (type(error).__qualname__, str(error))

    def _run(self, data: bytes | bytearray | memoryview) -> bytes:
        """Run the requested part on the sent values; a request that is repeated gets the earlier answer.

        One turn after the other is run, and those of one attempt alone: a part must not run twice.
        """
        dialect = self._dialect
        decoded = decode(data, resolve=dialect.resolver({}), policy=dialect.policy)
        part_request = read_part(decoded, PartRequest)
        last_answer = self._last_answer
        if last_answer is not None and (last_answer.attempt, last_answer.turn) == (
            part_request.attempt,
            part_request.turn,
        ):
            return last_answer.data  # the earlier response was lost with its connection
        attempt = part_request.attempt if last_answer is None else last_answer.attempt
        if (last_answer is None) != (part_request.turn == 0) or attempt != part_request.attempt:
            raise LocalBlockError.repeated()
        self._last_answer = _Answer(part_request.attempt, part_request.turn, b"")
        block, cells = self._block(part_request), self._cells[part_request.block]
        for name in block.stored:
            cells.setdefault(name, CellType())
        for name, value in part_request.values.items():
            cells.setdefault(name, CellType()).cell_contents = value
        states_before = {name: self._state(value) for name, value in part_request.values.items()}
        assignments = self._assignments[part_request.block]
        info = Info(block, cells, None, self._infos[part_request.block].globals_)
        num_assignments = {name: assignments[name] for name in block.stored}
        run = compiled(info, cells, assignments=assignments)
        with _Values():
            run()
        for name, value in part_request.values.items():
            if self._state(value) != states_before[name]:
                raise LocalBlockError.changed(name)
        self._exchanges[part_request.block].publish()
        assigned = {name for name, count in num_assignments.items() if assignments[name] != count}
        answer = self._answer(part_request, assigned, cells)
        self._last_answer = _Answer(part_request.attempt, part_request.turn, answer)
        return answer

    def _block(self, part_request: PartRequest) -> Block:
        """Return the requested body; raise a ``DecodeError`` if there is none with these variables."""
        if (
            not 0 <= part_request.block < len(self._statements)
            or part_request.place not in self._statements[part_request.block]
        ):
            raise DecodeError("the server asks for a part under tracer.local() that the trace does not have")
        nested, info = (
            self._statements[part_request.block][part_request.place],
            self._infos[part_request.block],
        )
        mentioned = mangled(names_in(nested.body), info.block.context.class_name)
        if not mentioned >= {*part_request.values, *part_request.names}:
            raise DecodeError("the server sends variables that the part under tracer.local() does not have")
        shared = mentioned.intersection(self._cells[part_request.block]).union(part_request.names)
        key = (part_request.block, part_request.place, shared)
        if key not in self._blocks:
            self._blocks[key] = compile_block(nested, info.block.source, shared, info.block.context)
        return self._blocks[key]

    def _answer(self, part_request: PartRequest, assigned: Set[str], cells: Mapping[str, CellType]) -> bytes:
        """Store the assigned values that stay here, and return the others as a message."""
        wanted = self._infos[part_request.block].wanted
        saved, flows = self._saved[part_request.block], self._flows[part_request.block]
        result = PartResult()
        for name in sorted(assigned):
            value = content(cells[name])
            if name in self.local_names:
                saved.pop(name, None)
                flows.pop(name, None)
                if value is not UNBOUND and SAVES.keeps(value):
                    saved[name] = value
                elif value is not UNBOUND and name in wanted:
                    flows[name] = value
            elif value is UNBOUND:
                result.deleted.append(name)
            else:
                result.values[name] = value
        result.saved = [name for name, value in result.values.items() if SAVES.keeps(value)]
        result.computed = [name for name, value in result.values.items() if _is_computed(value)]
        names = {id(value): name for name, value in part_request.values.items()}
        return encode(plain(result), reference=lambda value: self._reference(value, names))

    def _reference(self, value: Any, names: Mapping[int, str]) -> tuple[str, ...] | None:
        """Name a value that the engine sent, or that the server has itself; None for what must be sent."""
        name = names.get(id(value))
        return (GIVEN, name) if name is not None else self._dialect.reference(value, [])

    def _state(self, value: Any) -> bytes:
        """Return bytes that change if a value is modified in place; tensors are represented by version."""

        def reference(referred: Any) -> tuple[str, ...] | None:
            if isinstance(referred, torch.Tensor):
                return ("tensor", str(id(referred)), str(referred._version))  # noqa: SLF001 - torch has no public version counter
            return self._dialect.reference(referred, [])

        return encode(value, reference=reference)


class _LocalVariables:
    """The variables of one block that stay here; invokes share them as they share other variables."""

    def __init__(self, part: SentPart, assignments: Assignments, names: frozenset[str]) -> None:
        self.identities = {name: identity for name, identity in part.identities.items() if name in names}
        self.cells = {name: cell for name, cell in assignments.cells.items() if name in self.identities}
        self.stored = [name for name in part.info.block.stored if name in self.identities]
        self.assignments = assignments


def _statements(part: SentPart, tracer: Tracer) -> _Found:
    """Return a block's ``with tracer.local():`` statements by position, whatever the tracer's name is."""
    info = part.info
    names = {name for name, cell in part.cells.items() if content(cell) is tracer}
    by_line = {}
    for nested in info.block.nested:
        match nested.node.items[nested.item].context_expr:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="local")) if name in names or (
                name not in part.cells and info.globals_.get(name) is tracer
            ):
                by_line[place_of(nested)] = nested
    return by_line


class _Stripper(ast.NodeTransformer):
    def __init__(self, places: Mapping[tuple[int, int], int]) -> None:
        self._places = places

    def visit_With(self, node: ast.With) -> ast.AST:
        """Remove a local statement's body, and its items after ``tracer.local()``."""
        num_left = self._places.get((node.lineno, node.col_offset))
        if num_left is not None and num_left <= len(node.items):
            node.items = node.items[: len(node.items) - num_left + 1]
            node.body = [ast.Pass()]
        return self.generic_visit(node)


def _without(body: Sequence[ast.stmt], statements: _Found) -> list[ast.stmt]:
    """Return copies of a block's statements, without the bodies of local ones."""
    if not statements:
        return list(body)
    places: dict[tuple[int, int], int] = {}
    for line, column, num_left in statements:
        places[(line, column)] = max(num_left, places.get((line, column), 0))
    stripper = _Stripper(places)
    return [stripper.visit(copy.deepcopy(statement)) for statement in body]


def _is_computed(value: Any) -> bool:
    """Return whether a value has a tensor with a gradient function, which cannot be sent."""
    have_gradients: list[bool] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        have_gradients.append(tensor.grad_fn is not None)
        return tensor

    map_tensors(value, note)
    return any(have_gradients)


class _Values(TorchFunctionMode):
    """Refuses to mix meta tensors with real ones, since torch may then return arbitrary values."""

    def __torch_function__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call torch's function, unless it would get meta tensors and real ones."""
        arguments = [*args, *(kwargs or {}).values()]
        are_meta = {argument.is_meta for argument in arguments if isinstance(argument, torch.Tensor)}
        if len(are_meta) > 1:
            raise LocalBlockError.without_values()
        return func(*args, **(kwargs or {}))
