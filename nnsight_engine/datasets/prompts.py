"""Prompts from JSON lines, Parquet, text or an iterable, read as they are needed.

The digest of a shard's prompts is over what the source says, before any tokenizer: a resumed run checks the
prompts of complete shards without tokenizing them.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, Literal

import fsspec
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from nnsight_engine.datasets.manifest import (
    PromptSourceError,
    SettingsError,
    SourceFile,
    SourceIdentity,
)

Format = Literal["jsonl", "parquet", "text"]
_FORMATS: Final[Mapping[str, Format]] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".txt": "text",
}
_COMPRESSED: Final = (".gz", ".bz2", ".xz", ".zst")
_FIELDS: Final = ("text", "prompt", "messages", "token_ids")
_MAX_TOKEN: Final = 2**31 - 1
_PARQUET_ROWS: Final = 1024


class Prompt(msgspec.Struct, frozen=True, omit_defaults=True):
    """One of three forms; the other two are None."""

    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    token_ids: list[int] | None = None


class PromptDigest:
    """SHA-256 over prompts, in order."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, prompt: Prompt) -> None:
        self._hash.update(msgspec.json.encode(prompt, order="sorted") + b"\n")

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


class PromptSource:
    """Yields prompts; ``identity`` says where they are from.

    Raises:
        SettingsError: There is no such file, or its name does not say its format.
        PromptSourceError: While iterating: a line is no prompt.
    """

    def __init__(self, source: Any, form: Format | None = None) -> None:
        """Read a path or fsspec URL, also with ``*``, or an iterable of texts, lists of ids or objects.

        ``form`` is the format of the files, by default the one that their names say.
        """
        if not isinstance(source, str | os.PathLike):
            if not isinstance(source, Iterable):
                raise SettingsError(f"prompts are a path, a URL or an iterable, got {type(source).__name__}")
            self._items: Iterable[Any] | None = source
            self.identity = SourceIdentity("iterable")
            return
        self._items = None
        name = os.fspath(source)
        self._filesystem, path = fsspec.core.url_to_fs(name)
        paths = sorted(self._filesystem.glob(path)) if "*" in path else [path]
        try:
            files = [
                SourceFile(_last(file_path), int(self._filesystem.size(file_path))) for file_path in paths
            ]
        except (OSError, TypeError) as error:
            raise SettingsError(f"there is no file of prompts at {name}: {error}") from error
        if not files:
            raise SettingsError(f"no file of prompts matches {name}")
        self._files = [(file_path, form or _format_of(file_path)) for file_path in paths]
        self.identity = SourceIdentity(self._files[0][1], name, files)

    def __iter__(self) -> Iterator[Prompt]:
        if self._items is not None:
            for number, item in enumerate(self._items):
                yield _prompt(item, "the iterable", number + 1)
            return
        for path, form in self._files:
            yield from self._read(path, form)

    def _read(self, path: str, form: Format) -> Iterator[Prompt]:
        name = _last(path)
        if form == "parquet":
            with self._filesystem.open(path, "rb") as file:
                yield from _parquet(name, file)
            return
        parse = _text if form == "text" else _json
        with self._filesystem.open(path, "rb", compression="infer") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield parse(line, name, number)


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _format_of(path: str) -> Format:
    name = next((path.removesuffix(end) for end in _COMPRESSED if path.endswith(end)), path)
    form = _FORMATS.get(os.path.splitext(name)[1])
    if form is None:
        raise SettingsError(
            f"the name of {path} says no format: name it .jsonl, .parquet or .txt, or give the format"
        )
    return form


def _text(line: bytes, file: str, number: int) -> Prompt:
    try:
        return Prompt(text=line.decode().rstrip("\r\n"))
    except UnicodeDecodeError as error:
        raise PromptSourceError(file, number, f"not UTF-8: {error}") from error


def _json(line: bytes, file: str, number: int) -> Prompt:
    try:
        value = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PromptSourceError(file, number, f"not JSON: {error}") from error
    return _prompt(value, file, number)


def _parquet(name: str, file: Any) -> Iterator[Prompt]:
    try:
        table = pq.ParquetFile(file)
    except pa.ArrowInvalid as error:
        raise PromptSourceError(name, 1, f"not Parquet: {error}") from error
    columns = [column for column in _FIELDS if column in table.schema_arrow.names]
    numbers = itertools.count(1)
    for batch in table.iter_batches(_PARQUET_ROWS, columns=columns):
        for row in batch.to_pylist():
            yield _prompt({key: row[key] for key in columns if row[key] is not None}, name, next(numbers))


def _prompt(value: Any, file: str, number: int) -> Prompt:
    """Return a source's item as a prompt: an object with one of ``_FIELDS``, or its bare content."""
    if isinstance(value, Prompt):
        return value
    if not isinstance(value, Mapping):
        value = {"prompt": value}
    fields = [name for name in _FIELDS if name in value]
    if len(fields) != 1:
        raise PromptSourceError(file, number, f"needs one of {', '.join(_FIELDS)}, got {list(value)[:8]}")
    prompt = _made(fields[0], value[fields[0]])
    if prompt is None:
        raise PromptSourceError(
            file, number, f"`{fields[0]}` has the wrong type: text is a string, token_ids are integers from 0"
        )
    return prompt


def _made(field: str, content: Any) -> Prompt | None:
    """Return the prompt with this content; None if the content is of a type that the field does not take."""
    if isinstance(content, str):
        return Prompt(text=content) if field in {"text", "prompt"} else None
    items = content.tolist() if hasattr(content, "tolist") else content
    if not isinstance(items, list | tuple):
        return None
    if field == "messages":
        return (
            Prompt(messages=list(items)) if items and all(isinstance(item, dict) for item in items) else None
        )
    are_ids = field != "text" and all(type(item) is int and 0 <= item <= _MAX_TOKEN for item in items)
    return Prompt(token_ids=list(items)) if are_ids else None
