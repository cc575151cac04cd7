"""``Forwarded`` says what ``X-Forwarded-For`` would, and a header that was not chosen says nothing."""

from __future__ import annotations

import pytest

from app.forwarded import as_x_forwarded


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("for=203.0.113.9", {"x-forwarded-for": "203.0.113.9"}),
        (
            "For=203.0.113.9;proto=https;by=10.0.0.1",
            {"x-forwarded-for": "203.0.113.9", "x-forwarded-proto": "https"},
        ),
        (
            'for="[2001:db8::1]:4711";proto=http, for="10.0.0.2:80";proto=HTTPS',
            {"x-forwarded-for": "2001:db8::1, 10.0.0.2", "x-forwarded-proto": "https"},
        ),
        ('for="a, b=\\"c\\";d", for=10.0.0.2', {"x-forwarded-for": 'a, b="c";d, 10.0.0.2'}),
        ("for=unknown", {"x-forwarded-for": "unknown"}),
        ("proto=https", {"x-forwarded-for": "unknown", "x-forwarded-proto": "https"}),
        ("for=10.0.0.2;proto=gopher", {"x-forwarded-for": "10.0.0.2"}),
        ('for="10.0.0.2', {}),
        ("", {}),
        (",,;", {}),
        ("=", {}),
    ],
)
def test_each_hop_is_said_in_the_older_way(text: str, expected: dict[str, str]) -> None:
    headers = [
        (b"host", b"a"),
        (b"x-forwarded-for", b"6.6.6.6"),
        (b"forwarded", text.encode()),
        (b"x-forwarded-proto", b"https"),
    ]
    said = {name.decode(): value.decode() for name, value in as_x_forwarded(headers)}
    assert said == {"host": "a", **expected}


def test_several_lines_are_one_list() -> None:
    headers = [(b"forwarded", b"for=10.0.0.1"), (b"forwarded", b"for=10.0.0.2")]
    assert as_x_forwarded(headers) == [(b"x-forwarded-for", b"10.0.0.1, 10.0.0.2")]


@pytest.mark.timeout(60)  # against minutes if characters are read again and again
def test_no_header_is_read_again_and_again() -> None:
    assert as_x_forwarded([(b"forwarded", b"for=192.0.2.1," + b" " * 500_000 + b"x")]) == []
