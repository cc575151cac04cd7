"""Dictionaries in the database, with the labels of their features; their weights are files.

Functions for labels take the session of their caller's transaction.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from sqlalchemy import delete, func, insert, select
from sqlalchemy.orm import Session

from api_schemas.dictionaries import Dictionary, DictionaryFeature
from api_schemas.errors import ErrorCode
from app.limits.allowances import Allowance
from app.storage.database import Database
from app.storage.tables import Base, DictionaryNameRow, DictionaryRow, FeatureLabelRow
from app.storage.versions import VersionStore, VersionTable, write_version
from nnsight_engine.features.config import DictionaryConfig
from nnsight_engine.features.saelens import model_of

_LABELS: Final = Base.metadata.tables[FeatureLabelRow.__tablename__]
_LABEL_BYTES: Final = 64
"""The bytes that a label is counted with beside its text."""
_AT_ONCE: Final = 2000


def num_label_bytes(labels: Mapping[int, str]) -> int:
    return sum(_LABEL_BYTES + len(text.encode()) for text in labels.values())


def add_labels(session: Session, dictionary: int, labels: Mapping[int, str]) -> None:
    # As rows and not as objects of the ORM, which takes twice as long for a hundred thousand.
    adding, given = insert(_LABELS), list(labels.items())
    for start in range(0, len(given), _AT_ONCE):
        rows = [
            {"dictionary": dictionary, "feature": feature, "text": text, "folded": text.casefold()}
            for feature, text in given[start : start + _AT_ONCE]
        ]
        session.connection().execute(adding, rows)


def replace_labels(session: Session, dictionary: int, labels: Mapping[int, str]) -> None:
    session.execute(delete(FeatureLabelRow).where(FeatureLabelRow.dictionary == dictionary))
    add_labels(session, dictionary, labels)


def find_features(
    session: Session, dictionary: int, *, words: Sequence[str], feature: int | None, after: int, limit: int
) -> list[DictionaryFeature]:
    """Return features with a label, by id; ``words`` all occur in a label, without case."""
    row = FeatureLabelRow
    wanted = [row.dictionary == dictionary, row.feature > after]
    wanted += [row.folded.contains(word, autoescape=True) for word in _needed(words)]
    if feature is not None:
        wanted.append(row.feature == feature)
    found = session.execute(select(row.feature, row.text).where(*wanted).order_by(row.feature).limit(limit))
    return [DictionaryFeature(id=one, label=text) for one, text in found]


def _needed(words: Sequence[str]) -> list[str]:
    """Return folded words without parts of others, by length: a label is compared until one is missing."""
    needed: list[str] = []
    for word in sorted({word.casefold() for word in words}, key=len, reverse=True):
        if not any(word in longer for longer in needed):
            needed.append(word)
    return needed


def ids_of(session: Session, dictionary: int, labels: Sequence[str], limit: int) -> dict[str, list[int]]:
    """Return the features that have exactly one of the labels, at most ``limit`` each, by label."""
    row, found = FeatureLabelRow, dict[str, list[int]]()
    for label in labels:
        wanted = select(row.feature).where(row.dictionary == dictionary, row.text == label)
        found[label] = list(session.scalars(wanted.order_by(row.feature).limit(limit)))
    return found


def labels_of(session: Session, dictionary: int, ids: Sequence[int]) -> dict[int, str]:
    table, found = FeatureLabelRow, dict[int, str]()
    for start in range(0, len(ids), _AT_ONCE):
        some = table.feature.in_(ids[start : start + _AT_ONCE])
        wanted = select(table.feature, table.text).where(table.dictionary == dictionary, some)
        found |= {row[0]: row[1] for row in session.execute(wanted)}
    return found


Labels = Mapping[int, str]

_TABLE: Final = VersionTable(
    DictionaryNameRow,
    DictionaryRow,
    kind="dictionary",
    plural="dictionaries",
    prefix="dict_",
    not_found=ErrorCode.DICTIONARY_NOT_FOUND,
    name_taken=ErrorCode.DICTIONARY_NAME_TAKEN,
)

_MADE: Final = {"object", "own", "bytes", "trained_on", "warnings"}
"""The properties that are no columns."""


@dataclasses.dataclass(frozen=True, slots=True)
class NewDictionary:
    """A dictionary to be stored, checked against its weights and the model; ``sha256`` is the weights'.

    ``output_at`` is the point whose value a transcoder reconstructs; None for ``at``.
    """

    tenant: str
    name: str
    model: str
    shared: bool
    config: DictionaryConfig
    cfg: bytes
    at: str
    output_at: str | None
    dtype: str
    sha256: str
    weights_bytes: int
    labels: Labels
    is_first: bool = False

    @property
    def num_bytes(self) -> int:
        return self.weights_bytes + len(self.cfg) + num_label_bytes(self.labels)


@dataclasses.dataclass(frozen=True, slots=True)
class FoundDictionary:
    """A dictionary for operations; ``number`` is the argument of ``ids_of`` and ``labels_of``."""

    number: int
    about: Dictionary
    cfg: bytes


class DictionaryStore(VersionStore[DictionaryRow, Dictionary]):
    """Dictionaries of all tenants; the content of a version is its ``cfg.json``."""

    def __init__(self, database: Database, allowance: Allowance) -> None:
        super().__init__(database, allowance, _TABLE, _described)

    async def add(self, new: NewDictionary) -> Dictionary:
        """Store the next version of a name; its file is there already.

        Raises:
            ApiError: ``dictionary_store_full``; ``dictionary_name_taken``: by another tenant's shared one.
            NameUsedError: It must be the first of its name, and is not.
        """

        def write(session: Session) -> Dictionary:
            _TABLE.check_room(session, self._allowance, new.num_bytes, new.tenant)
            version = _TABLE.next_version(
                session, new.tenant, new.name, shared=new.shared, is_first=new.is_first
            )
            config = new.config
            row = DictionaryRow(
                id=dictionary_id, tenant=new.tenant, name=new.name, version=version, model=new.model,
                shared=new.shared, sha256=new.sha256, num_bytes=new.num_bytes, created_at=time.time(),
                data=new.cfg, at=new.at, output_at=new.output_at, architecture=config.architecture.value,
                input_width=config.input_width, output_width=config.output_width,
                num_features=config.num_features, dtype=new.dtype, weights_bytes=new.weights_bytes,
                num_labels=len(new.labels),
            )  # fmt: skip
            session.add(row)
            session.flush()
            add_labels(session, row.number, new.labels)
            return _described(row, new.tenant)

        dictionary_id = _TABLE.new_id()
        return await write_version(self._database, write)

    async def set_labels(self, dictionary_id: str, tenant: str, labels: Labels) -> Dictionary:
        """Replace the labels; the caller checks the permission."""

        def write(session: Session) -> Dictionary:
            seen = _TABLE.row(session, dictionary_id, tenant)
            # Two requests that replace the labels at once do so one after the other.
            row = session.get_one(DictionaryRow, seen.number, with_for_update=True)
            num_bytes = row.weights_bytes + len(row.data) + num_label_bytes(labels)
            _TABLE.check_room(session, self._allowance, max(0, num_bytes - row.num_bytes), row.tenant)
            replace_labels(session, row.number, labels)
            row.num_bytes, row.num_labels = num_bytes, len(labels)
            return _described(row, tenant)

        return await write_version(self._database, write)

    async def features(
        self,
        dictionary_id: str,
        tenant: str,
        *,
        words: Sequence[str],
        feature: int | None,
        after: int,
        limit: int,
    ) -> tuple[list[DictionaryFeature], bool]:
        """Return features by id, and whether there are more; ``words`` all occur in a label, without case.

        ``feature`` is the one to return, with a label or without; None for all that have one.
        """

        def read(session: Session) -> list[DictionaryFeature]:
            row = _TABLE.row(session, dictionary_id, tenant)
            found = find_features(
                session, row.number, words=words, feature=feature, after=after, limit=limit + 1
            )
            is_there = feature is not None and after < feature < row.num_features
            if not found and is_there and feature is not None and not words:
                return [DictionaryFeature(id=feature)]
            return found

        found = await self._database.read(read)
        return found[:limit], len(found) > limit

    async def ids_of(self, number: int, labels: Sequence[str], limit: int) -> dict[str, list[int]]:
        """Return the features of a dictionary that have exactly one of some labels, by label."""
        return await self._database.read(lambda session: ids_of(session, number, labels, limit))

    async def labels_of(self, number: int, ids: Sequence[int]) -> dict[int, str]:
        return await self._database.read(lambda session: labels_of(session, number, ids))

    async def find(
        self, text: str, id_: str | None, tenant: str, models: Sequence[str]
    ) -> FoundDictionary | None:
        def read(session: Session) -> FoundDictionary | None:
            row = self._named(session, text, id_, tenant, models)
            return (
                None if row is None else FoundDictionary(row.number, _described(row, tenant), bytes(row.data))
            )

        return await self._database.read(read)

    async def num_uses(self, sha256: str) -> int:
        wanted = select(func.count()).select_from(DictionaryRow).where(DictionaryRow.sha256 == sha256)
        return await self._database.read(lambda session: int(session.scalar(wanted) or 0))


def _described(row: DictionaryRow, tenant: str) -> Dictionary:
    values: dict[str, Any] = {name: getattr(row, name) for name in Dictionary.model_fields.keys() - _MADE}
    trained_on = model_of(json.loads(row.data.decode("utf-8-sig"))) or None
    own = row.tenant == tenant
    return Dictionary.model_validate({**values, "own": own, "bytes": row.num_bytes, "trained_on": trained_on})
