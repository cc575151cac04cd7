"""The fuzzer finds each fault that is put in on purpose, within some cases, and none where there is none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.fuzz.bench import Bench
from tests.e2e.fuzz.cases import Author
from tests.e2e.fuzz.mutants import MUTANTS, Mutant
from tests.e2e.fuzz.rounds import Round
from tests.e2e.watching import Watch

pytestmark = [pytest.mark.e2e, pytest.mark.heavy]

_NUM_CASES = 120


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Serve in bfloat16, where rounding hides most, with split prompts and preemptions."""
    bench = Bench(Round("llama", "bfloat16", "tight"), tmp_path_factory.mktemp("fuzz"))
    yield bench
    bench.close()


@pytest.fixture
def reads_change_nothing(watch: Watch) -> Iterator[None]:
    """Take the place of the check after each test, which would find one of the faults too."""
    yield
    watch.changed.clear()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__.strip("_"))
def test_a_fault_put_in_on_purpose_is_found(
    bench: Bench, mutant: Mutant, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    author = Author(bench.world, seed=1)
    found = next((faults for _ in range(_NUM_CASES) if (faults := bench.faults(author.case()))), [])
    assert found, mutant.__doc__
    assert not any("Traceback" in fault for fault in found), found


def test_nothing_is_found_where_nothing_is_wrong(bench: Bench) -> None:
    author = Author(bench.world, seed=1)
    for _ in range(10):
        case = author.case()
        assert bench.faults(case) == [], case
