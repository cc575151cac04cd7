"""Random requests are answered alike on engines of all kinds, chunked, preempted and drafted as they are."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.check_process import report_of
from tests.e2e.engine_kinds import KINDS, V1_SYNC, V2_SYNC, environment
from tests.e2e.random_requests import MODEL
from tests.e2e.same_answers import decoded, differences
from tests.families.checkpoints import write_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.heavy]

Answers = list[dict[str, Any]]
SEED = 1
SUPPORTED = [kind for kind in KINDS if kind.speculation is None]
"""The kinds of engine on which this project runs."""
REFERENCE = f"{V1_SYNC}:roomy"
NAMES = [f"{kind}:tight" for kind in SUPPORTED]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answers]:
    """Return the answers of each engine, and see that the requests met what they are to meet."""
    folder = tmp_path_factory.mktemp("random")
    write_checkpoint("llama", folder / MODEL)
    found = {}
    for first in (V1_SYNC, V2_SYNC):
        names = [name for name in [REFERENCE, *NAMES] if name.startswith(first.runner)]
        if not names:
            continue
        arguments = [str(SEED), *names]
        report = report_of("tests.e2e.random_requests", folder, arguments, environment=environment(first))
        for name, counts in report.items():
            found[name] = decoded((folder / name).read_bytes())
            assert not [what for what in counts if what.startswith("left behind")], counts
            assert counts["answered"] > len(found[name]) / 2, counts
            assert (counts["preempted"] > 0) == name.endswith("tight"), counts
            assert counts["left"], counts
            assert counts["traced"], counts
    return found


@pytest.mark.parametrize("name", NAMES)
def test_random_requests_are_answered_alike(answers: dict[str, Answers], name: str) -> None:
    pairs = zip(answers[name], answers[REFERENCE], strict=True)
    wrong = {index: differences(got, wanted)[:3] for index, (got, wanted) in enumerate(pairs)}
    assert not {index: found for index, found in wrong.items() if found}
