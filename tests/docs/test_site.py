"""The documentation site builds without warnings, has every page, and requests nothing from other hosts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from api_schemas.interventions import OPERATIONS
from nnsight_engine import __all__ as public_names

PROJECT: Final = Path(__file__).resolve().parents[2]
VALUES: Final = {"BUNDLED_MODEL_NAME", "BundledModelError", "__version__"}
"""Public names without a section of their own."""
_FETCHED = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?(?:https?:)?//|<link\b[^>]*\bhref=["']?(?:https?:)?//"""
)
_IMPORTED = re.compile(r"""@import|url\(["']?(?:https?:)?//""")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as ``make docs`` builds it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_of_the_repository_is_there(site: Path) -> None:
    for page in (PROJECT / "docs").rglob("*.md"):
        assert (site / page.relative_to(PROJECT / "docs").with_suffix(".html")).is_file(), page


def test_files_beside_the_pages_are_there_too(site: Path) -> None:
    text = (site / "operating.html").read_text(encoding="utf-8")
    assert 'href="project/benchmarks/results/index.html"' in text
    assert (site / "project/benchmarks/results/index.html").is_file()
    assert (site / "project/examples/steer_sentiment.py").read_bytes() == (
        PROJECT / "examples/steer_sentiment.py"
    ).read_bytes()


def test_references_are_made_of_the_code(site: Path) -> None:
    routes = (site / "reference/http.html").read_text(encoding="utf-8")
    for name in ("POST /v1/completions", "GET /v1/capabilities", "Idempotency-Key"):
        assert name in routes, name
    operations = (site / "reference/operations.html").read_text(encoding="utf-8")
    for operation in OPERATIONS:
        assert f'id="{operation}"' in operations
    python = (site / "reference/python.html").read_text(encoding="utf-8")
    for name in set(public_names) - VALUES:
        assert re.search(rf'id="nnsight_engine\.[\w.]*\b{name}"', python), name


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert not _FETCHED.search(page.read_text(encoding="utf-8")), page
    for sheet in site.rglob("*.css"):
        assert not _IMPORTED.search(sheet.read_text(encoding="utf-8")), sheet


def test_words_can_be_searched_for(site: Path) -> None:
    index = (site / "search/search_index.json").read_text(encoding="utf-8")
    assert "norm_match" in index
    assert "tutorial.html" in index
