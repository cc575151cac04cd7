"""Drafts of a model's own MTP layer: results as without drafts, and from the model's own layers only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.check_process import report_of
from tests.e2e.draft_checkpoints import write_with_mtp
from tests.e2e.engine_kinds import V1_SYNC, V2_SYNC, EngineKind, environment
from tests.e2e.mtp_check import MODEL, OPERATIONS
from tests.e2e.same_answers import decoded, differences
from tests.families.checkpoints import NUM_LAYERS

pytestmark = [pytest.mark.e2e, pytest.mark.heavy]

LEAST = EngineKind("v1", is_async=False, speculation="mtp")
"""The kind that every change is tested with."""
REST = (
    EngineKind("v1", is_async=True, speculation="mtp"),
    EngineKind("v2", is_async=False, speculation="mtp"),
    EngineKind("v2", is_async=True, speculation="mtp"),
)
UNDRAFTED = ("plain", "range", "trace")
"""Requests without drafts, and the plain one, which has no provenance."""
Rows = dict[str, dict[str, int]]
Answers = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mtp")
    write_with_mtp(path / MODEL)
    return path


def played(folder: Path, kinds: list[EngineKind]) -> dict[EngineKind, tuple[Answers, Rows]]:
    """Return the answers of engines of one runner, and the drafted and refused rows of each request."""
    first = V1_SYNC if kinds[0].runner == "v1" else V2_SYNC
    names = [str(kind) for kind in kinds]
    report = report_of("tests.e2e.mtp_check", folder, names, environment=environment(first))
    return {kind: (decoded((folder / str(kind)).read_bytes()), report[str(kind)]) for kind in kinds}


@pytest.fixture(scope="module")
def without_drafts_and_with(folder: Path) -> dict[EngineKind, tuple[Answers, Rows]]:
    return played(folder, [V1_SYNC, LEAST])


def assert_alike(got: tuple[Answers, Rows], wanted: tuple[Answers, Rows]) -> None:
    answers, rows = got
    assert not [answer["error"] for answer in answers if answer["error"]]
    pairs = zip(OPERATIONS, answers, wanted[0], strict=True)
    wrong = {name: differences(one, other)[:3] for name, one, other in pairs}
    assert not {name: found for name, found in wrong.items() if found}
    for name, counts in rows.items():
        if name in UNDRAFTED:
            assert counts["drafted"] == 0, name
        else:
            assert counts["drafted"] > counts["refused"] > 0, (name, counts)


def test_answers_equal_those_without_drafts(
    without_drafts_and_with: dict[EngineKind, tuple[Answers, Rows]],
) -> None:
    assert_alike(without_drafts_and_with[LEAST], without_drafts_and_with[V1_SYNC])


def test_a_capture_has_the_models_own_layers(
    without_drafts_and_with: dict[EngineKind, tuple[Answers, Rows]],
) -> None:
    answers, _ = without_drafts_and_with[LEAST]
    by_name = dict(zip(OPERATIONS, answers, strict=True))
    (choice,) = by_name["captured"]["choices"]
    read = choice["collected"]["results"][0]
    layers = {f"layers.{number}.output" for number in range(NUM_LAYERS)}
    assert set(read["points"]) == {"embed.output", *layers, "norm.output"}


@pytest.mark.parametrize("kind", REST, ids=str)
def test_answers_equal_those_without_drafts_on_other_kinds(
    folder: Path, without_drafts_and_with: dict[EngineKind, tuple[Answers, Rows]], kind: EngineKind
) -> None:
    assert_alike(played(folder, [kind])[kind], without_drafts_and_with[V1_SYNC])
