"""A model family of each mechanism: what the engine reads, writes and generates is what transformers does,
and what blocks find at standard points is what they find on ``LanguageModel``.

Each family's checkpoint is checked in a process of its own, see ``family_check``; the tests
here read its report, so that a test's name says which check of which family failed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import pytest
import torch

from tests.e2e.family_check import (
    ADAPTED,
    CERTIFICATE,
    CHECKS,
    COMPILED_CHECKS,
    COMPILED_FAMILIES,
    QUANTISED,
)
from tests.e2e.family_reports import FamilyReports
from tests.e2e.point_blocks import BESIDE_CERTIFICATE
from tests.families.checkpoints import FAMILIES, MECHANISMS, UNTABLED, VARIANTS
from tests.families.quantised import FORMATS

pytestmark = pytest.mark.e2e

_ADAPTED: Final = tuple(
    f"{family}{ADAPTED}"
    for family in (
        "mistral",
        "qwen2",
        "qwen3",
        "gemma2",
        "gemma3",
        "phi3",
        "granite",
        "smollm3",
        "opt",
        "gpt_neox",
    )
)
"""Families with a LoRA adapter, of which vLLM takes none for GPT-2; Llama's are in ``test_lora``. The other
dense families have their modules in common with one of these.
"""
_RUN_ANYWHERE: Final = ("fp8",)
_HAS_AVX512: Final = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
_QUANTISED: Final = tuple(
    f"llama{QUANTISED}{form}" for form in FORMATS if _HAS_AVX512 or form in _RUN_ANYWHERE
)
"""On a CPU without AVX-512, vLLM 0.32 has no kernel for 4 bits, and its int8 computes other values."""
_COMPILED: Final = tuple(
    family for family in COMPILED_FAMILIES if QUANTISED not in family or family in _QUANTISED
)


def thinned(families: Iterable[str]) -> list[Any]:
    """Return parameters of which all but the first are heavy."""
    first, *others = families
    return [first, *(pytest.param(one, marks=pytest.mark.heavy) for one in others)]


@pytest.fixture(scope="module")
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FamilyReports:
    return FamilyReports(request, tmp_path_factory.mktemp)


@pytest.fixture(
    scope="module",
    params=thinned((*MECHANISMS, *_ADAPTED, *_QUANTISED)),
)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("check", CHECKS)
def test_family_agrees_with_transformers(family: str, check: str, report: FamilyReports) -> None:
    failure = report(family)[check]
    assert failure is None, failure


@pytest.mark.parametrize("block", sorted(BESIDE_CERTIFICATE))
def test_a_block_gives_the_same_on_both_engines(family: str, block: str, report: FamilyReports) -> None:
    failure = report(family)[block]
    assert failure is None, failure


@pytest.mark.parametrize("what", CERTIFICATE)
def test_certificate_of_a_family_is_ok(family: str, what: str, report: FamilyReports) -> None:
    failure = report(family)[what]
    assert failure is None, failure


@pytest.mark.parametrize("check", COMPILED_CHECKS)
@pytest.mark.parametrize("family", thinned(_COMPILED), scope="module")
def test_compiled_engine_agrees_with_transformers(family: str, check: str, report: FamilyReports) -> None:
    failure = report(family)[check]
    assert failure is None, failure


_OTHERS: Final = [family for family in (*FAMILIES, *VARIANTS, *UNTABLED) if family not in MECHANISMS]


@pytest.mark.heavy
@pytest.mark.parametrize("family", _OTHERS)
def test_another_family_agrees_with_transformers(family: str, report: FamilyReports) -> None:
    failures = {check: failure for check, failure in report(family).items() if failure is not None}
    assert not failures, "\n".join(f"{check}: {failure}" for check, failure in failures.items())
