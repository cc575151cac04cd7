"""Random requests are answered alike on engines of all kinds, chunked, preempted and drafted as they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.check_process import report_of
from tests.e2e.conditional_requests import OF_ONE_STAGE
from tests.e2e.draft_checkpoints import write_with_mtp
from tests.e2e.engine_kinds import KINDS, EngineKind
from tests.e2e.random_requests import MODEL
from tests.e2e.same_answers import decoded, differences
from tests.families.checkpoints import write_checkpoint

pytestmark = pytest.mark.e2e

Answers = dict[str, list[dict[str, Any]]]
ASKED = frozenset(
    {
        *("ablate", "capture", "detect", "feature", "features", "flag", "logit_lens", "patch", "probe"),
        *("n", "prompt_logprobs", "steer", "stop", "trace", "when"),
    }
)
"""What requests ask for, of which at least one answer of each is compared."""
LEAST = (
    EngineKind(is_async=True, speculation="small_draft", has_graphs=True),
    EngineKind(is_async=True, num_stages=2),
)
"""Which kinds every change is tested with, in the process of the reference."""
REST = [kind for kind in KINDS if kind not in LEAST]
"""The other kinds of engine on which this project runs."""
REFERENCE = f"{EngineKind(is_async=False)}:roomy"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("random")
    write_checkpoint("llama", path / MODEL)
    return path


def played(folder: Path, names: Sequence[str]) -> Answers:
    """Return the answers of engines, and see that the requests met what they are to meet."""
    report = report_of("tests.e2e.random_requests", folder, names)
    found = {}
    for name, entry in report.items():
        counts, answers = entry["counts"], decoded((folder / name).read_bytes())
        found[name] = [answer | known for answer, known in zip(answers, entry["requests"], strict=True)]
        assert not [what for what in counts if what.startswith("left behind")], counts
        assert counts["answered"] > len(found[name]) / 2, counts
        assert (counts["preempted"] > 0) == name.endswith("tight"), counts
        assert counts["left"], counts
        assert counts["of parts"], counts
        kind = EngineKind.named(name.split(":")[0])
        assert (counts["drafted rows"] > 0) == (kind.speculation is not None), counts
        assert (counts["in graphs"] > 0) == kind.has_graphs, counts
        # The drafts of EAGLE are random, and those of MTP know one layer: all may be refused.
        has_accepted = counts["drafted rows"] > counts["refused rows"]
        assert has_accepted or kind.speculation in {None, "eagle", "eagle3", "mtp"}, counts
    return found


@pytest.fixture(scope="module")
def answers(folder: Path) -> Answers:
    """Return the answers of the reference and of the kinds that every change is tested with."""
    return played(folder, [REFERENCE, *(f"{kind}:tight" for kind in LEAST)])


def assert_alike(answers: Answers, reference: Answers, name: str) -> None:
    refused = OF_ONE_STAGE if EngineKind.named(name.split(":")[0]).num_stages > 1 else frozenset()
    compared, wrong = set[str](), {}
    for index, (got, wanted) in enumerate(zip(answers[name], reference[REFERENCE], strict=True)):
        if refused & set(wanted["asked"]):
            assert got["error"][0] == "unsupported_combination"
            continue
        are_answered = bool(got["choices"] and wanted["choices"])
        if wanted["leaves"] and not are_answered:
            continue  # it left after as many steps on both, which were enough for its answer on one
        wrong[index] = differences(got, wanted)[:3]
        if are_answered:
            compared.update(wanted["asked"])
    found = {index: what for index, what in wrong.items() if what}
    assert not found
    assert compared == ASKED - refused


@pytest.mark.parametrize("kind", LEAST, ids=str)
def test_random_requests_are_answered_alike(answers: Answers, kind: EngineKind) -> None:
    assert_alike(answers, answers, f"{kind}:tight")


@pytest.mark.heavy
@pytest.mark.parametrize("kind", REST, ids=str)
def test_random_requests_are_answered_alike_on_other_kinds(
    folder: Path, answers: Answers, kind: EngineKind
) -> None:
    name = f"{kind}:tight"
    assert_alike(played(folder, [name]), answers, name)


@pytest.fixture(scope="module")
def with_mtp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mtp")
    write_with_mtp(path / MODEL)
    return path


@pytest.fixture(scope="module")
def without_drafts(with_mtp: Path) -> Answers:
    return played(with_mtp, [REFERENCE])


@pytest.mark.heavy
@pytest.mark.parametrize("kind", ["sync-mtp", "async-mtp"])
def test_drafts_of_a_models_own_layer_change_no_answer(
    with_mtp: Path, without_drafts: Answers, kind: str
) -> None:
    """Nor are that layer's values among the model's."""
    name = f"{kind}:tight"
    found = played(with_mtp, [name])
    assert_alike(found, without_drafts, name)
    drafted, refused = (sum(answer[what] for answer in found[name]) for what in ("drafted", "refused"))
    assert drafted > refused > 0
