"""Lookup of the source text of a function or class that is loaded in this process.

A function's text is compiled and compared with the loaded code, so that the text of a file that was edited
since is not sent. Of a class's text, the declared names are compared.
"""

from __future__ import annotations

import abc
import ast
import functools
import itertools
import linecache
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType, FunctionType
from typing import Any

from nnsight_engine.serialization.source.fragments import (
    FUTURE_FLAGS,
    WHOLE_LINES,
    SourceFragment,
    compile_function,
    nested_codes,
)
from nnsight_engine.tracing.block_names import mangled
from nnsight_engine.tracing.loaded_code import defines, first_line, sent_name
from nnsight_engine.tracing.source_text import ChangedSourceError, SourceText, parse
from nnsight_engine.tracing.tracer import SITES

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef
_Found = tuple[_Definition, str | None, str]
"""A definition, the name of its enclosing class, and its qualified name."""
_Named = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_DECLARING = (ast.AnnAssign, ast.Assign, ast.Expr, ast.Pass, *_Named)
"""Statements of a class body whose effect on the class can be told from the text."""
_ALLOWS_AWAIT = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT


class NoSourceError(Exception):
    pass


def fragment_of_function(code: CodeType, globals_: dict[str, Any]) -> SourceFragment:
    """Return the source of a function; raise ``NoSourceError`` if it is not available or has changed."""
    try:
        source = SITES.reader.read(
            code, globals_, lambda text: _fragment_in(text, code, globals_) is not None
        )
    except ChangedSourceError as error:
        raise NoSourceError(f"its source was not found: {error}") from None
    fragment = None if source is None else _fragment_in(source, code, globals_)
    if fragment is None:
        raise NoSourceError(f"its source, {code.co_filename!r}, was not found; define it in a file or a cell")
    return fragment


def _fragment_in(source: SourceText, code: CodeType, globals_: dict[str, Any]) -> SourceFragment | None:
    """Return the smallest definition in a text that compiles to this code; None if none does."""
    if code.co_name == "<lambda>":
        near = [
            candidate for candidate in _beginning_at(source, code) if isinstance(candidate[0], ast.Lambda)
        ]
        # Python 3.12 records no position for returned constants.
        fitting = [candidate for candidate in near if _is_body_of(candidate[0], code)] or near
    else:
        fitting = [candidate for candidate in _beginning_at(source, code) if _is_def_of(candidate[0], code)]
    for node, class_name, _ in sorted(fitting, key=lambda candidate: _size(candidate[0])):
        fragment = _fragment(source, node, code.co_name, code.co_qualname, class_name, code.co_flags)
        if _defines(fragment, code, exactly=len(fitting) > 1) and defines(source.tree, code, globals_, node):
            return fragment
    return None


def fragment_of_class(kind: type) -> tuple[SourceFragment, CodeType, dict[str, Any]]:
    """Return the source of a class, the code of its body, and the globals in which it was defined."""
    for source, globals_ in _sources_of(kind):
        definitions = itertools.chain.from_iterable(_by_first_line(source.tree).values())
        nodes = [
            node
            for node, _, name in definitions
            if name == kind.__qualname__ and isinstance(node, ast.ClassDef)
        ]
        if not nodes:
            continue
        node = _chosen(nodes, kind, source.filename)
        if not _declares(node, kind):
            raise NoSourceError(
                f"the text of {source.filename!r} has changed since it was loaded; start again"
            )
        body = _body_of(source, kind.__qualname__, first_line(node))
        fragment = _fragment(source, node, node.name, kind.__qualname__, None, body.co_flags)
        return fragment, body, globals_
    raise NoSourceError(
        "its source was not found; define the class with a `class` statement in a file or a cell, or send "
        "its data in a dict"
    )


def functions_of(kind: type) -> Iterator[FunctionType]:
    """Yield the functions among a class's own attributes, unwrapping properties, methods and decorators."""
    for value in vars(kind).values():
        parts = (value.fget, value.fset, value.fdel) if isinstance(value, property) else (value,)
        for part in parts:
            inner: Any = getattr(part, "__func__", getattr(part, "func", part))
            while isinstance(getattr(inner, "__wrapped__", None), FunctionType):
                inner = inner.__wrapped__
            if isinstance(inner, FunctionType):
                yield inner


def _beginning_at(source: SourceText, code: CodeType) -> Sequence[_Found]:
    return _by_first_line(source.tree).get(code.co_firstlineno, ())


@functools.lru_cache(maxsize=64)
def _by_first_line(tree: ast.Module) -> Mapping[int, Sequence[_Found]]:
    """Return the definitions of a file by first line; cached, as files are large and searched many times."""
    by_line: dict[int, list[_Found]] = {}
    for definition in _definitions(tree):
        by_line.setdefault(first_line(definition[0]), []).append(definition)
    return by_line


def _definitions(tree: ast.Module) -> Iterator[_Found]:
    """Yield all definitions of a file, each with its enclosing class and qualified name."""
    waiting: list[tuple[ast.AST, str | None, str]] = [(tree, None, "")]
    while waiting:
        node, class_name, prefix = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            name = "<lambda>" if isinstance(node, ast.Lambda) else node.name
            yield node, class_name, prefix + name
            if isinstance(node, ast.ClassDef):
                class_name, prefix = node.name, f"{prefix}{name}."
            else:
                prefix = f"{prefix}{name}.<locals>."
        waiting.extend((child, class_name, prefix) for child in ast.iter_child_nodes(node))


def _is_def_of(node: _Definition, code: CodeType) -> bool:
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == code.co_name


def _is_body_of(node: _Definition, code: CodeType) -> bool:
    """Return whether an instruction of the code has exactly the position of a lambda's body."""
    body = node.body
    if not isinstance(body, ast.expr):
        return False
    position = (body.lineno, body.end_lineno, body.col_offset, body.end_col_offset)
    return position in list(code.co_positions())


def _size(node: _Definition) -> tuple[int, int]:
    return ((node.end_lineno or 0) - node.lineno, (node.end_col_offset or 0) - node.col_offset)


def _defines(fragment: SourceFragment, code: CodeType, *, exactly: bool) -> bool:
    """Return whether the text compiles to this code, which a tool may have rewritten unless ``exactly``."""
    try:
        compiled = compile_function(fragment, code.co_freevars)
    except SyntaxError:
        return False
    signature = code.co_argcount + code.co_kwonlyargcount
    return (
        compiled.co_varnames[:signature] == code.co_varnames[:signature]
        and compiled.co_argcount == code.co_argcount
        and set(compiled.co_freevars) == set(code.co_freevars)
        and (not exactly or _parts(compiled) == _parts(code))
    )


def _parts(code: CodeType) -> tuple[Any, ...]:
    """Return what equal code has in common, whatever its file and lines are."""
    constants = [
        _parts(constant) if isinstance(constant, CodeType) else (type(constant), repr(constant))
        for constant in code.co_consts
    ]
    return code.co_code, code.co_names, constants


def _fragment(
    source: SourceText, node: _Definition, name: str, qualname: str, class_name: str | None, flags: int
) -> SourceFragment:
    """Return a definition's whole lines as a fragment; of a lambda only the expression, by its columns."""
    first, column = first_line(node), WHOLE_LINES
    lines = list(source.lines[first - 1 : node.end_lineno])
    if isinstance(node, ast.Lambda):
        column = node.col_offset
        lines[-1] = lines[-1].encode()[: node.end_col_offset].decode()
        lines[0] = lines[0].encode()[column:].decode()
    return SourceFragment(
        filename=sent_name(source.filename), text="".join(lines), line=first, column=column, name=name,
        qualname=qualname, class_name=class_name, flags=flags & FUTURE_FLAGS,
    )  # fmt: skip


def _sources_of(kind: type) -> Iterator[tuple[SourceText, dict[str, Any]]]:
    """Yield the texts that may define a class, with its globals: by its methods, its module, and cells."""
    for function in functions_of(kind):
        code = function.__code__
        # The attributes of an enum include methods of its bases.
        is_own = function.__module__ == kind.__module__
        if is_own and code.co_qualname.startswith(f"{kind.__qualname__}."):
            source = SITES.reader.read(code, function.__globals__)
            if source is not None:
                yield source, function.__globals__
                break
    module = sys.modules.get(kind.__module__)
    if module is None:
        return
    names = [getattr(module, "__file__", None)]
    # Notebook cells are not files; the newest one that defines the class is used. Text that an error of
    # another side quotes is none of them: it would be sent on as the user's own code.
    names += [
        name
        for name, entry in reversed(linecache.cache.items())
        if len(entry) > 2 and entry[1] is None and not getattr(entry[2], "is_quoted", False)
    ]
    for name in names:
        lines = linecache.getlines(name, vars(module)) if name else []
        if lines:
            try:
                yield SourceText(str(name), tuple(lines), parse("".join(lines), str(name))), vars(module)
            except (SyntaxError, ValueError):
                continue


def _chosen(nodes: list[ast.ClassDef], kind: type, filename: str) -> ast.ClassDef:
    """Return the last definition that holds methods of the loaded class; the last of all if none does."""
    codes = [function.__code__ for function in functions_of(kind)]
    lines = {code.co_firstlineno for code in codes if code.co_filename == filename}
    holding = [node for node in nodes if any(node.lineno <= line <= (node.end_lineno or 0) for line in lines)]
    return max(holding or nodes, key=lambda node: node.lineno)


def _declares(node: ast.ClassDef, kind: type) -> bool:
    """Return whether a definition declares a class's variables; True if decorators or ``if`` may add some."""
    if type(kind) not in {type, abc.ABCMeta} or not all(
        isinstance(statement, _DECLARING) for statement in node.body
    ):
        return True
    annotated = {
        _mangled(statement.target.id, node.name): None
        for statement in node.body
        if isinstance(statement, ast.AnnAssign)
        and isinstance(statement.target, ast.Name)
        and statement.simple
    }
    known = vars(kind).get("__annotations__", {} if sys.version_info < (3, 14) else annotated)
    if list(known) != list(annotated):
        return False
    assigned = [
        target for statement in node.body if isinstance(statement, ast.Assign) for target in statement.targets
    ]
    names = [_mangled(target_.id, node.name) for target_ in assigned if isinstance(target_, ast.Name)]
    names += [_mangled(statement.name, node.name) for statement in node.body if isinstance(statement, _Named)]
    return bool(node.decorator_list) or all(name in vars(kind) for name in names)


def _mangled(name: str, class_name: str) -> str:
    (mangled_name,) = mangled(frozenset({name}), class_name)
    return mangled_name


def _body_of(source: SourceText, qualname: str, line: int) -> CodeType:
    """Return the code of a class's body, from a compilation of its whole file."""
    try:
        module = compile(source.tree, source.filename, "exec", flags=_ALLOWS_AWAIT, dont_inherit=True)
    except SyntaxError as error:
        raise NoSourceError(f"its source does not compile: {error}") from error
    for code in nested_codes(module):
        if code.co_qualname == qualname and code.co_firstlineno == line:
            return code
    raise NoSourceError("its source has changed; start again")
