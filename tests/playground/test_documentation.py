"""The API documentation in a browser: it renders, sends requests, and contacts only its server."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from tests.playground.conftest import Open
from tests.playground.test_page import Playground, playground, serve

pytestmark = pytest.mark.heavy

__all__ = ["playground", "serve"]  # fixtures


def test_the_document_is_shown_and_sends_requests(playground: Playground, open_page: Open) -> None:
    page: Page = open_page(f"{playground.url}/docs", waits=False)
    page.get_by_role("button", name="/health/live").first.click()
    page.get_by_role("button", name="Try it out").click()
    page.get_by_role("button", name="Execute").click()
    expect(page.locator(".live-responses-table")).to_contain_text('"status": "ready"')


def test_the_document_is_shown_for_reading(playground: Playground, open_page: Open) -> None:
    page: Page = open_page(f"{playground.url}/redoc", waits=False)
    expect(page.get_by_role("heading", name="Complete a prompt, with interventions")).to_be_visible()
