"""Conversion of HTTP error responses to exceptions.

The module does not import torch, because terminal commands import it at startup.
"""

from __future__ import annotations

import httpx

from nnsight_engine.remote_backend.errors import RemoteError


def refusal(response: httpx.Response) -> RemoteError:
    """Return the error for an HTTP error response that has been read.

    A response without the API's error object is described by its text, cut to 500 characters.
    """
    status, after = response.status_code, response.headers.get("retry-after", "")
    try:
        pause_s = float(after) if after.isdecimal() else 0.0
        return RemoteError.from_body(response.json(), status=status, retry_after_s=pause_s)
    except (ValueError, KeyError, TypeError):
        text = response.text[:500] or response.reason_phrase
        return RemoteError(f"{response.url} answered {status}: {text}", status=status)
