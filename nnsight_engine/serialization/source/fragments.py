"""Source fragments: the text of one function, class or ``with`` statement, and its position in its file.

Python versions differ in byte code and syntax trees but not in the meaning of source, so text is what is
sent. Both sides compile it here, under its file's name and at its own lines and columns. The names that
compiled code uses are the globals to send with it, and possible attributes of modules.
"""

from __future__ import annotations
import __future__

import ast
import dis
from collections.abc import Iterator, Sequence
from types import CodeType
from typing import NamedTuple

from nnsight_engine.serialization.limits import Check
from nnsight_engine.tracing.loaded_code import first_line, sent_name
from nnsight_engine.tracing.source_text import parameters, parse

_READS_GLOBAL = frozenset(
    {"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS"}
)
_RUNS_AT_ONCE = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "__annotate__"})
"""Names of nested code that runs together with the enclosing code. From Python 3.14 on a class's
annotations are evaluated lazily, but a reader with an older Python evaluates them immediately."""
_TYPE_PARAMETERS = "<generic parameters of "
"""Prefix of the name of the code around a generic class or function, from 3.12 on; it also runs at once."""


def global_names(code: CodeType, *, at_once: bool = False) -> list[str]:
    """Return the global names that code uses; ``at_once`` leaves out functions that run later or never."""
    names: dict[str, None] = {}
    for nested in nested_codes(code, at_once=at_once):
        for instruction in dis.get_instructions(nested):
            if instruction.opname in _READS_GLOBAL:
                names[str(instruction.argval)] = None
    return list(names)


def mentioned_in(code: CodeType) -> set[str]:
    """Return every name and string constant of the code; each may be the name of a module attribute."""
    names: set[str] = set()
    for nested in nested_codes(code):
        names.update(nested.co_names)
        names.update(constant for constant in nested.co_consts if isinstance(constant, str))
    return names


def nested_codes(code: CodeType, *, at_once: bool = False) -> Iterator[CodeType]:
    """Yield a code object and all in it; ``at_once`` leaves out functions that run later or never."""
    waiting = [code]
    while waiting:
        code_object = waiting.pop()
        yield code_object
        waiting.extend(
            constant
            for constant in code_object.co_consts
            if isinstance(constant, CodeType) and (not at_once or _runs_at_once(constant.co_name))
        )


def _runs_at_once(name: str) -> bool:
    return name in _RUNS_AT_ONCE or name.startswith(_TYPE_PARAMETERS)


def nested_code(code: CodeType, name: str) -> CodeType:
    """Return the code object called ``name`` that is nested in another, or raise a ``SyntaxError``."""
    waiting = [code]
    while waiting:
        nested = [
            constant for outer in waiting for constant in outer.co_consts if isinstance(constant, CodeType)
        ]
        for inner in nested:
            if inner.co_name == name:
                return inner
        waiting = nested
    raise SyntaxError(f"the text does not define {name}")


FUTURE_FLAGS = sum({getattr(__future__, name).compiler_flag for name in __future__.all_feature_names})
OURS = "__nnsight_"
"""Prefix of the names of the wrappers that are put around a text to compile it."""
_OWNER = f"{OURS}owner__"
_MAKER = f"{OURS}maker__"
WHOLE_LINES = -1


class SourceFragment(NamedTuple):
    """The source of one definition.

    Attributes:
        text: The lines, or for a lambda only the expression.
        column: Column of a lambda in its first line, in bytes; ``WHOLE_LINES`` for anything else.
        class_name: The enclosing class, which determines how ``self.__x`` is mangled, or None.
        flags: Compiler flags of the file's ``from __future__`` features.
    """

    filename: str
    text: str
    line: int
    column: int
    name: str
    qualname: str
    class_name: str | None
    flags: int

    @property
    def num_characters(self) -> int:
        return sum(map(len, (self.text, self.filename, self.name, self.qualname, self.class_name or "")))


def statement_at(text: str, line: int, filename: str) -> ast.stmt:
    """Return the single statement in these whole lines, or raise a ``SyntaxError``."""
    indented = text[:1] in {" ", "\t", "\f"}
    try:
        tree = parse("if 1:\n" + text if indented else text, filename)
    except SyntaxError as error:
        _move(error, line - (2 if indented else 1))
        raise
    body = tree.body
    if indented and len(body) == 1 and isinstance(body[0], ast.If):
        body = body[0].body
    if len(body) != 1:
        raise SyntaxError(f"one statement is wanted, not {len(body)}")
    moved = ast.increment_lineno(body[0], line - (2 if indented else 1))
    if isinstance(moved, ast.stmt):
        return moved
    raise AssertionError("a statement that was moved is still one")


def compile_function(
    fragment: SourceFragment, variables: Sequence[str], check: Check | None = None
) -> CodeType:
    """Return the code of a function or lambda whose free variables are among ``variables``."""
    node = definition_of(fragment)
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        raise SyntaxError(f"a function is wanted, not {type(node).__name__}")  # noqa: TRY004 - the text is wrong, not an argument
    line = first_line(node)
    _prepare(node, fragment, check)
    body: list[ast.stmt] = [ast.Expr(value=node)] if isinstance(node, ast.Lambda) else [node]
    if not isinstance(node, ast.Lambda) and node.name not in variables:
        # The function's own name, used inside it, is a global and not a variable of the wrapper.
        body.insert(0, ast.Global(names=[node.name]))
    code = _only(_compiled(body, fragment, variables), fragment.name)
    return _renamed(code, code.co_qualname, fragment.qualname).replace(co_firstlineno=line)


def compile_class(fragment: SourceFragment, variables: Sequence[str], check: Check | None = None) -> CodeType:
    """Return the code of a function that defines a class and returns it."""
    node = statement_at(fragment.text, fragment.line, fragment.filename)
    if not isinstance(node, ast.ClassDef):
        raise SyntaxError(f"a class is wanted, not {type(node).__name__}")  # noqa: TRY004 - the text is wrong, not an argument
    _prepare(node, fragment, check)
    body: list[ast.stmt] = [node, ast.Return(value=ast.Name(id=node.name, ctx=ast.Load()))]
    if node.name in variables:
        body.insert(0, ast.Nonlocal(names=[node.name]))
    elif "<locals>" not in fragment.qualname:
        body.insert(0, ast.Global(names=[node.name]))
    maker = ast.FunctionDef(name=_MAKER, args=parameters([]), body=body, decorator_list=[])
    code = _only(_compiled([maker], fragment, variables), _MAKER)
    return _renamed(code, nested_code(code, node.name).co_qualname, fragment.qualname)


def tree_of(fragment: SourceFragment) -> ast.Module:
    node = definition_of(fragment)
    body: ast.stmt = ast.Expr(value=node) if isinstance(node, ast.Lambda) else node
    return ast.Module(body=[ast.copy_location(body, node)], type_ignores=[])


def definition_of(fragment: SourceFragment) -> ast.stmt | ast.Lambda:
    """Return the definition in a fragment, at its own lines and columns, or raise a ``SyntaxError``."""
    if fragment.column != WHOLE_LINES:
        return _lambda_at(fragment)
    return statement_at(fragment.text, fragment.line, fragment.filename)


def named_bases(fragment: SourceFragment) -> dict[str, int]:
    """Return the bases given as plain names, with their index; none if a base is starred."""
    node = statement_at(fragment.text, fragment.line, fragment.filename)
    bases = node.bases if isinstance(node, ast.ClassDef) else []
    if any(isinstance(base, ast.Starred) for base in bases):
        return {}
    return {base.id: index for index, base in enumerate(bases) if isinstance(base, ast.Name)}


def _move(error: SyntaxError, num_lines: int) -> None:
    """Move a syntax error from its line in the parsed text to that in the file."""
    if error.lineno is not None:
        error.lineno += num_lines
    if error.end_lineno is not None:
        error.end_lineno += num_lines


def type_parameters(fragment: SourceFragment) -> frozenset[str]:
    node = statement_at(fragment.text, fragment.line, fragment.filename)
    return frozenset(parameter.name for parameter in getattr(node, "type_params", ()))


def _lambda_at(fragment: SourceFragment) -> ast.Lambda:
    """Return a fragment's lambda, parsed in parentheses, at the lines and columns of its file."""
    try:
        body = parse(f"({fragment.text}\n)", fragment.filename).body
    except SyntaxError as error:
        _move(error, fragment.line - 1)
        raise
    node = body[0].value if len(body) == 1 and isinstance(body[0], ast.Expr) else None
    if not isinstance(node, ast.Lambda):
        raise SyntaxError("a lambda is wanted")  # noqa: TRY004 - the text is wrong, not an argument
    for child in ast.walk(node):
        if isinstance(child, (ast.expr, ast.arg, ast.keyword)):
            if child.end_lineno == 1:
                child.end_col_offset = (child.end_col_offset or 0) + fragment.column - 1
            if child.lineno == 1:
                child.col_offset += fragment.column - 1
    ast.increment_lineno(node, fragment.line - 1)
    return node


def _prepare(
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef,
    fragment: SourceFragment,
    check: Check | None,
) -> None:
    """Check a definition's name, remove what the sender has evaluated, and apply the policy's check."""
    name = "<lambda>" if isinstance(node, ast.Lambda) else node.name
    if name != fragment.name:
        raise SyntaxError(f"the text defines {name}, not {fragment.name}")
    if not isinstance(node, ast.ClassDef):
        _leave_values_out(node)
    if check is not None:
        check(node, sent_name(fragment.filename))


def _leave_values_out(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
    """Remove the parts evaluated at definition time: the sender has evaluated them and sends their values."""
    arguments = node.args
    arguments.defaults, arguments.kw_defaults = [], [None] * len(arguments.kwonlyargs)
    all_arguments = [
        *arguments.posonlyargs,
        *arguments.args,
        *arguments.kwonlyargs,
        arguments.vararg,
        arguments.kwarg,
    ]
    for argument in all_arguments:
        if argument is not None:
            argument.annotation = None
    if not isinstance(node, ast.Lambda):
        node.decorator_list, node.returns = [], None
        if hasattr(node, "type_params"):  # from Python 3.12 on
            node.type_params = []


def _compiled(body: list[ast.stmt], fragment: SourceFragment, variables: Sequence[str]) -> CodeType:
    """Compile a body in a wrapper function, whose parameters are the free variables of the body's code."""
    owner = ast.FunctionDef(name=_OWNER, args=parameters(variables), body=body, decorator_list=[])
    top: ast.stmt = owner
    if fragment.class_name is not None:
        top = ast.ClassDef(name=fragment.class_name, bases=[], keywords=[], body=[owner], decorator_list=[])
    tree = ast.Module(body=[top], type_ignores=[])
    for node in ast.walk(tree):
        if isinstance(node, (ast.stmt, ast.expr, ast.arg)) and not hasattr(node, "lineno"):
            node.lineno = node.end_lineno = fragment.line
            node.col_offset = node.end_col_offset = 0
    code: CodeType = compile(
        tree, fragment.filename, "exec", flags=fragment.flags & FUTURE_FLAGS, dont_inherit=True
    )
    return _only(code if fragment.class_name is None else _only(code, fragment.class_name), _OWNER)


def _only(code: CodeType, name: str) -> CodeType:
    """Return the only code object directly inside another.

    Deeper ones, of comprehensions and class bodies, rely on arguments that a function call does not supply.
    """
    codes = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    if len(codes) != 1 or codes[0].co_name != name:
        raise SyntaxError(f"the text does not define {name}, and nothing else")
    return codes[0]


def _renamed(code: CodeType, before: str, after: str) -> CodeType:
    """Return code whose qualified names, its own and those in it, begin with ``after`` and not ``before``."""

    def renamed(constant: object) -> object:
        if isinstance(constant, CodeType):
            return _renamed(constant, before, after)
        if isinstance(constant, str) and _within(constant, before):
            return after + constant[len(before) :]
        return constant

    name = code.co_qualname
    qualname = after + name[len(before) :] if _within(name, before) else name
    return code.replace(co_consts=tuple(map(renamed, code.co_consts)), co_qualname=qualname)


def _within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")
