"""What a server answered instead of doing what it was asked. Loads no torch, as commands start with it."""

from __future__ import annotations

import httpx

from nnsight_engine.remote_backend.errors import RemoteError


def refusal(response: httpx.Response) -> RemoteError:
    """Return the error that an answer which was read says, or its text where it is none of ours."""
    status, after = response.status_code, response.headers.get("retry-after", "")
    try:
        pause_s = float(after) if after.isdecimal() else 0.0
        return RemoteError.said(response.json(), status=status, retry_after_s=pause_s)
    except (ValueError, KeyError, TypeError):
        text = response.text[:500] or response.reason_phrase
        return RemoteError(f"{response.url} answered {status}: {text}", status=status)
