"""What a dataset is: its settings, its ``manifest.json``, and the errors of this package.

The manifest is a function of prompts, settings and values: no times, no host names, no random ids. All fields
but those that a finished run adds (``PROGRESS_FIELDS``) must be equal for a run to be resumed.
"""

from __future__ import annotations

import re
from typing import Any, Final, Literal

import msgspec

FORMAT_VERSION: Final = 1
MANIFEST: Final = "manifest.json"
PROGRESS_FIELDS: Final = ("state", "num_prompts", "num_rows", "digest", "shards")
DTYPES: Final = ("float32", "bfloat16", "int8")
Dtype = Literal["float32", "bfloat16", "int8"]

_ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2, "int8": 1}
_FILE_NAME: Final = re.compile(r"(?!\.)[\w.-]{1,200}")


class DatasetError(Exception):
    """Base of the errors of datasets."""


class SettingsError(DatasetError, ValueError):
    """A setting has no meaning for a dataset; the message names the allowed values."""


class ManifestMismatchError(DatasetError):
    """The folder has a dataset with other settings, of another model or of other prompts."""


class PromptsChangedError(DatasetError):
    """The prompts are not those of which the folder's complete shards were made."""


class IncompleteDatasetError(DatasetError):
    """The dataset was not finished, or is none."""


class DatasetBusyError(DatasetError):
    """Another process writes this dataset."""


class PromptSourceError(DatasetError, ValueError):
    """A prompt cannot be read; ``line`` counts from 1, in Parquet rows."""

    def __init__(self, file: str, line: int, reason: str) -> None:
        super().__init__(f"{file}, line {line}: {reason}")
        self.file = file
        self.line = line


class SinkError(DatasetError):
    """The dataset's place did not take a file, after all retries."""


class SinkFullError(SinkError):
    """There is no room: a full disk, a quota or the largest size of a file."""


class SinkRefusedError(SinkError):
    """The place does not exist, or denies access; retries would not help."""


class SinkTimeoutError(SinkError):
    """The place did not take everything within the time given to ``close``."""


def error_named(name: str, message: str) -> DatasetError:
    """Return the error of another process, by its class's name; of the base class for an unknown name."""
    kinds: list[type[DatasetError]] = [DatasetError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return next((kind for kind in kinds if kind.__name__ == name), DatasetError)(message)


class Point(msgspec.Struct, frozen=True):
    """A standard point such as ``layers.4.output``; values of several dimensions are flattened."""

    name: str
    width: int


class ModelIdentity(msgspec.Struct, frozen=True):
    """``fingerprint`` is a hash over the config and over weights; ``revision`` may be empty."""

    name: str
    fingerprint: str
    revision: str = ""
    dtype: str = ""


class EngineIdentity(msgspec.Struct, frozen=True):
    """``settings`` are those that decide about the last bits of values."""

    name: str
    versions: dict[str, str] = {}
    settings: dict[str, str] = {}


class Interventions(msgspec.Struct, frozen=True):
    """The operations in their JSON form; the fingerprint is empty without any."""

    fingerprint: str = ""
    operations: list[dict[str, Any]] = []


class SourceFile(msgspec.Struct, frozen=True):
    name: str
    bytes: int


class SourceIdentity(msgspec.Struct, frozen=True):
    """Where the prompts come from; no files for an iterable."""

    kind: str
    name: str = ""
    files: list[SourceFile] = []


class PlanSettings(msgspec.Struct, frozen=True):
    """How prompts are divided into packs, computed in one step each, and packs into shards."""

    pack_tokens: int = 4096
    pack_prompts: int = 32
    shard_tokens: int = 2**20
    shard_bytes: int = 2**30

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) < 1:
                raise SettingsError(f"`{name}` must be at least 1, got {getattr(self, name)}")


class RowSettings(msgspec.Struct, frozen=True):
    """Which rows are kept, and how.

    Attributes:
        where: A ``Where`` in JSON form, without fields that are not set.
        reduction: ``all``, ``last``, ``mean``, ``every:K`` or ``random:N``.
        scores: Names of numbers that each row has in the index beside prompt, position and token.
        max_tokens: Longer prompts are cut to their first tokens; None for no limit.
    """

    points: list[Point]
    where: dict[str, Any] = {}
    reduction: str = "all"
    seed: int = 0
    dtype: Dtype = "float32"
    scores: list[str] = []
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise SettingsError(f"`dtype` is one of {', '.join(DTYPES)}, got {self.dtype!r}")
        names = [point.name for point in self.points]
        if not names or len(set(names)) != len(names):
            raise SettingsError(f"`points` names at least one point, each once, got {names}")
        wrong = next((name for name in names if not _FILE_NAME.fullmatch(name)), None)
        if wrong is not None:
            raise SettingsError(
                f"a point's name is part of a file name: letters, digits, . _ -, got {wrong!r}"
            )

    @property
    def row_bytes(self) -> int:
        """Bytes of one row at all points, without the index."""
        scale_bytes = _ITEM_BYTES["float32"] if self.dtype == "int8" else 0
        return sum(point.width * _ITEM_BYTES[self.dtype] + scale_bytes for point in self.points)


class FileRecord(msgspec.Struct, frozen=True):
    """``crc32`` is of the whole file, in hexadecimal, as zlib and gzip compute it."""

    bytes: int
    crc32: str


class ShardRecord(msgspec.Struct, frozen=True):
    """A complete shard; ``digest`` is the SHA-256 of its prompts, ``dropped`` those that have no rows."""

    number: int
    first_prompt: int
    num_prompts: int
    num_rows: int
    digest: str
    dropped: list[int]
    files: dict[str, FileRecord]

    @property
    def num_bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())


class Manifest(msgspec.Struct, frozen=True):
    """``digest`` is the SHA-256 over the digests of the shards, empty until the dataset is complete."""

    model: ModelIdentity
    engine: EngineIdentity
    tokenizer: str
    source: SourceIdentity
    rows: RowSettings
    plan: PlanSettings = PlanSettings()
    interventions: Interventions = Interventions()
    format_version: int = FORMAT_VERSION
    state: Literal["incomplete", "complete"] = "incomplete"
    num_prompts: int = 0
    num_rows: int = 0
    digest: str = ""
    shards: list[ShardRecord] = []

    def encode(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"

    @classmethod
    def decode(cls, data: bytes, place: str) -> Manifest:
        try:
            return msgspec.json.decode(data, type=cls)
        except (msgspec.DecodeError, SettingsError) as error:
            raise IncompleteDatasetError(
                f"{place}/{MANIFEST} is no manifest of a dataset: {error}"
            ) from error

    def check_resumes(self, found: Manifest, place: str) -> None:
        """Raise ManifestMismatchError unless ``found`` is of a run with the same settings."""
        ours, theirs = msgspec.to_builtins(self), msgspec.to_builtins(found)
        for name in PROGRESS_FIELDS:
            del ours[name], theirs[name]
        difference = _first_difference(theirs, ours, "")
        if difference is not None:
            field, there, here = difference
            raise ManifestMismatchError(
                f"{place} has a dataset with `{field}` {there!r}, and this run has {here!r}: write to "
                "another folder, or repeat the call with the same settings"
            )


def _first_difference(there: Any, here: Any, path: str) -> tuple[str, Any, Any] | None:
    """Return the dotted path of the first field that differs and its two values; None if all are equal."""
    if isinstance(there, dict) and isinstance(here, dict):
        for key in [*there, *(key for key in here if key not in there)]:
            difference = _first_difference(
                there.get(key), here.get(key), f"{path}.{key}" if path else str(key)
            )
            if difference is not None:
                return difference
        return None
    return None if there == here else (path, there, here)
