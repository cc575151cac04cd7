"""A browser as packaged by Debian, which fails a test on errors while the playground is open."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Page,
    Request,
    expect,
    sync_playwright,
)

from tests.sharing import lacking

PROJECT: Final = Path(__file__).resolve().parents[2]
SOURCES: Final = PROJECT / "app" / "playground"
SCREENSHOTS: Final = Path(__file__).parent / "screenshots"
ARGUMENTS: Final = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
TIMEOUT_MS: Final = 30_000
RUN_MS: Final = 120_000
"""How long a view may run on a machine that has other things to do."""
expect.set_options(timeout=TIMEOUT_MS)
COPIED: Final = {
    "curl": "Copied the curl command.",
    "Python": "Copied the Python program.",
    "trace": "Copied the trace.",
    "link": "Copied the link.",
}

Open = Callable[..., Page]


@pytest.fixture(scope="session")
def chromium(request: pytest.FixtureRequest) -> str:
    """Where Chromium is."""
    found = shutil.which("chromium")
    if found is None:
        why = "Chromium is not installed; scripts/chromium.sh does that on Debian, as root"
        lacking(request, "--require-chromium", why)
    return found


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Browser]:
    """One browser, with a profile of its own that goes with it."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def npm_folder(npm: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The playground's sources with the packages of its lock."""
    folder = tmp_path_factory.mktemp("npm") / "playground"
    shutil.copytree(SOURCES, folder, ignore=shutil.ignore_patterns("node_modules", "static", "__pycache__"))
    subprocess.run([npm, "ci", "--no-progress"], cwd=folder, check=True, capture_output=True, timeout=240)
    return folder


@pytest.fixture(scope="session")
def axe(npm_folder: Path) -> str:
    """The script that checks accessibility."""
    return (npm_folder / "node_modules/axe-core/axe.min.js").read_text(encoding="utf-8")


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Opens pages in contexts of their own; none may ask another place, nor break its own policy."""
    contexts: list[BrowserContext] = []
    said: list[str] = []

    def note(message: ConsoleMessage) -> None:
        # An error status, which tests of errors expect, and which the page shows in words.
        if message.type == "error" and not message.text.startswith("Failed to load resource"):
            said.append(message.text)

    def note_request(server: str) -> Callable[[Request], None]:
        def check(request: Request) -> None:
            parts = urlsplit(request.url)
            if parts.scheme not in {"data", "blob"} and parts.netloc != server:
                said.append(f"asked {request.url}")

        return check

    def open_one(url: str, *, waits: bool = True, **options: Any) -> Page:
        size = options.pop("size", (1280, 900))
        viewport = {"width": size[0], "height": size[1]}
        context = browser.new_context(viewport=viewport, reduced_motion="reduce", **options)  # type: ignore[arg-type]
        context.set_default_timeout(TIMEOUT_MS)
        context.grant_permissions(["clipboard-read", "clipboard-write"])
        contexts.append(context)
        page = context.new_page()
        page.on("console", note)
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", note_request(urlsplit(url).netloc))
        page.goto(url)
        if waits:
            page.get_by_role("navigation", name="Views").wait_for()
        return page

    yield open_one
    for context in contexts:
        for page in context.pages:
            page.unroute_all(behavior="ignoreErrors")  # answers that a test does not wait for
        context.close()
    assert said == []


def link(url: str, **state: Any) -> str:
    """Return the address of the playground in a state, of which only what differs from its start is said."""
    text = json.dumps(state).encode()
    return f"{url}/playground#s={base64.urlsafe_b64encode(text).decode().rstrip('=')}"


def view_of(page: Page) -> Any:
    """Return the part of the page that has the view."""
    return page.locator("section.view")


def press(page: Page) -> None:
    """Run the view, and wait until it has ended."""
    view = view_of(page)
    view.get_by_role("button", name="Run", exact=True).click()
    view.get_by_text("Running…").wait_for(state="hidden", timeout=RUN_MS)


def copied(page: Page, name: str) -> str:
    """Press one of the buttons that copy, and return what was copied."""
    bar = page.get_by_role("group", name="Copy this view")
    bar.get_by_role("button", name=name, exact=True).click()
    bar.get_by_text(COPIED[name], exact=True).wait_for()
    text: str = page.evaluate("() => navigator.clipboard.readText()")
    return text


def shoot(page: Page, name: str) -> None:
    """Keep a picture of the whole page."""
    SCREENSHOTS.mkdir(exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)


def faults(page: Page, axe: str) -> list[str]:
    """Return what the accessibility check finds; for pages opened with ``bypass_csp``."""
    page.evaluate(axe)
    found = page.evaluate(
        "async () => (await axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa',"
        " 'wcag22aa', 'best-practice']})).violations.map((one) => `${one.id}: ${one.help}: "
        "${one.nodes.slice(0, 3).map((node) => node.html.slice(0, 160)).join(' | ')}`)"
    )
    return [str(one) for one in found]


def is_too_wide(page: Page) -> bool:
    """Return whether the page as a whole has to be scrolled sideways."""
    return bool(page.evaluate("() => document.documentElement.scrollWidth > window.innerWidth"))
