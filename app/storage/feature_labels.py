"""The labels of the features of dictionaries; functions take the session of their caller's transaction.

``dictionary`` is the number of a version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from sqlalchemy import delete, insert, select
from sqlalchemy.orm import Session

from api_schemas.dictionaries import DictionaryFeature
from app.storage.tables import Base, FeatureLabelRow

Labels = Mapping[int, str]

_LABELS: Final = Base.metadata.tables[FeatureLabelRow.__tablename__]
_LABEL_BYTES: Final = 64
"""The bytes that a label is counted with beside its text."""
_AT_ONCE: Final = 2000


def num_label_bytes(labels: Labels) -> int:
    return sum(_LABEL_BYTES + len(text.encode()) for text in labels.values())


def add_labels(session: Session, dictionary: int, labels: Labels) -> None:
    # As rows and not as objects of the ORM, which takes twice as long for a hundred thousand.
    adding, items = insert(_LABELS), list(labels.items())
    for start in range(0, len(items), _AT_ONCE):
        rows = [
            {"dictionary": dictionary, "feature": feature, "text": text, "folded": text.casefold()}
            for feature, text in items[start : start + _AT_ONCE]
        ]
        session.connection().execute(adding, rows)


def replace_labels(session: Session, dictionary: int, labels: Labels) -> None:
    session.execute(delete(FeatureLabelRow).where(FeatureLabelRow.dictionary == dictionary))
    add_labels(session, dictionary, labels)


def find_features(
    session: Session, dictionary: int, *, words: Sequence[str], feature: int | None, after: int, limit: int
) -> list[DictionaryFeature]:
    """Return features with a label, by id; ``words`` all occur in a label, without case."""
    row = FeatureLabelRow
    conditions = [row.dictionary == dictionary, row.feature > after]
    conditions += [row.folded.contains(word, autoescape=True) for word in _distinct_words(words)]
    if feature is not None:
        conditions.append(row.feature == feature)
    rows = session.execute(
        select(row.feature, row.text).where(*conditions).order_by(row.feature).limit(limit)
    )
    return [DictionaryFeature(id=feature_id, label=text) for feature_id, text in rows]


def _distinct_words(words: Sequence[str]) -> list[str]:
    """Return folded words without parts of others, by length: a label is compared until one is missing."""
    needed: list[str] = []
    for word in sorted({word.casefold() for word in words}, key=len, reverse=True):
        if not any(word in longer for longer in needed):
            needed.append(word)
    return needed


def ids_of(session: Session, dictionary: int, labels: Sequence[str], limit: int) -> dict[str, list[int]]:
    """Return the features whose label equals one of ``labels``, at most ``limit`` each, by label."""
    row, ids_by_label = FeatureLabelRow, dict[str, list[int]]()
    for label in labels:
        query = select(row.feature).where(row.dictionary == dictionary, row.text == label)
        ids_by_label[label] = list(session.scalars(query.order_by(row.feature).limit(limit)))
    return ids_by_label


def labels_of(session: Session, dictionary: int, ids: Sequence[int]) -> dict[int, str]:
    """Return the labels of those features that have one."""
    table, labels = FeatureLabelRow, dict[int, str]()
    for start in range(0, len(ids), _AT_ONCE):
        is_in_chunk = table.feature.in_(ids[start : start + _AT_ONCE])
        query = select(table.feature, table.text).where(table.dictionary == dictionary, is_in_chunk)
        labels |= {row[0]: row[1] for row in session.execute(query)}
    return labels
