"""The documentation site builds without warnings, has every page, and requests nothing from other hosts."""

from __future__ import annotations

import html
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
    index = (site / "reference/http.html").read_text(encoding="utf-8")
    pages = {page: page.read_text(encoding="utf-8") for page in (site / "reference/http").glob("*.html")}
    assert all(f'href="http/{page.name}#' in index for page in pages if page.stem != "schemas")
    headings = [one for text in pages.values() for one in re.findall(r'<h[23] id="([^"]+)"', text)]
    for name in ("post-v1completions", "get-v1capabilities"):
        assert headings.count(name) == index.count(f'#{name}"') == 1
    assert "Idempotency-Key" in pages[site / "reference/http/jobs.html"]
    most = max(text.count("<tr>") for text in pages.values())
    assert most < sum(text.count("<tr>") for text in pages.values()) / 3, (
        "the page of a group has a third of all"
    )
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
    assert "reference/http/openai.html" in index
    assert "project/benchmarks/results/" not in index


def test_the_navigation_has_four_tabs_and_every_page(site: Path) -> None:
    text = (site / "index.html").read_text(encoding="utf-8")
    tabs = re.findall(r'<a href="[^"]*" class="md-tabs__link">\s*(.*?)\s*</a>', text, re.DOTALL)
    assert [re.sub(r"\s+", " ", tab) for tab in tabs] == ["Start", "How to", "Running", "Reference"]
    linked = set(re.findall(r'<a href="([^"#]+)" class="md-nav__link', text))
    pages = {page.relative_to(PROJECT / "docs") for page in (PROJECT / "docs").rglob("*.md")}
    expected = {page.with_suffix(".html").as_posix() for page in pages if page.parts[0] != "decisions"}
    assert expected - {"index.html"} <= linked


def test_drawings_are_parts_of_their_pages_with_their_descriptions(site: Path) -> None:
    for page in (PROJECT / "docs").rglob("*.md"):
        drawings = re.findall(r"!\[([^\]]+)\]\([^)]*\.svg\)", page.read_text(encoding="utf-8"))
        text = (site / page.relative_to(PROJECT / "docs").with_suffix(".html")).read_text(encoding="utf-8")
        labels = re.findall(r'<svg role="img" aria-label="([^"]+)" [^>]*class="drawing"', text)
        assert [html.unescape(label) for label in labels] == drawings, page


def test_screenshots_are_there_for_both_schemes_of_the_theme(site: Path) -> None:
    num_shown = 0
    for source in (PROJECT / "docs").glob("*.md"):
        num_pictures = source.read_text(encoding="utf-8").count("\n<picture>")
        page = site / f"{source.stem}.html"
        for scheme in ("light", "dark"):
            shown = re.findall(rf'src="([^"#]+)#only-{scheme}"', page.read_text(encoding="utf-8"))
            assert len(shown) >= num_pictures, source.name
            assert all((page.parent / one).is_file() for one in shown), source.name
        num_shown += num_pictures
    assert num_shown


def test_flowcharts_are_drawn_with_all_their_words(site: Path) -> None:
    source = (PROJECT / "docs/development.md").read_text(encoding="utf-8")
    drawings = re.findall(
        r'<svg class="flowchart".*?</svg>', (site / "development.html").read_text(encoding="utf-8"), re.DOTALL
    )
    charts = re.findall(r"^```mermaid\n(.*?)^```", source, re.MULTILINE | re.DOTALL)
    assert len(drawings) == len(charts) > 0
    for chart, drawing in zip(charts, drawings, strict=True):
        shown = html.unescape(" ".join(re.findall(r"<text[^>]*>(.*?)</text>", drawing)))
        for label in re.findall(r"\[\(?(.*?)\)?\]", chart):
            assert label in shown
        # A pair of boxes has one arrow, with two heads where there are arrows both ways.
        assert drawing.count("marker-") >= chart.count("-->")
