"""The requests that the example makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Self

import httpx

TIMEOUT_S: Final = 600.0


class ExampleError(Exception):
    """What the person who runs the example should read, without a traceback."""


class Server:
    """The requests that the example makes.

    Args:
        base_url: Where the server listens, without ``/v1``.
        key: What it knows us by; empty where it has no keys.

    Attributes:
        base_url: Where it listens.
    """

    def __init__(self, base_url: str, key: str = "") -> None:
        """Connect on the first request."""
        self.base_url = base_url
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(base_url=base_url, headers=headers, timeout=TIMEOUT_S)

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connection."""
        self._client.close()

    def send(self, method: str, path: str, **content: Any) -> dict[str, Any]:
        """Return the JSON of an answer; raises ExampleError where there is none, or a refusal."""
        try:
            response = self._client.request(method, path, **content)
            answer: dict[str, Any] = response.json()
        except (httpx.TransportError, ValueError) as error:
            raise ExampleError(
                f"no server answers at {self.base_url} ({error!r}); start one with `make serve`, or "
                "name another with --base-url"
            ) from error
        if response.is_error:
            refusal = answer.get("error", {})
            raise ExampleError(
                f"the server refused the request: {refusal.get('message', answer)} "
                f"(status {response.status_code}, code {refusal.get('code')})"
            )
        return answer

    def complete(
        self, prompts: Sequence[str], interventions: Sequence[dict[str, Any]], **options: Any
    ) -> list[dict[str, Any]]:
        """Return the choices of a completion, in the order of the prompts."""
        body = {"prompt": list(prompts), "interventions": list(interventions), **options}
        choices: list[dict[str, Any]] = self.send("POST", "/v1/completions", json=body)["choices"]
        return sorted(choices, key=lambda choice: int(choice["index"]))
