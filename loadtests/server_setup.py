"""The preparation of a run: the server, keys, the model's properties, encoded traces."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import httpx

from api_schemas.server import Capabilities
from app.addresses import is_loopback
from benchmarks.servers import created_key, own_folders, served
from loadtests.bodies import Bodies
from loadtests.messages import messages_of
from loadtests.run_spec import HOSTILE, TENANT_OF, Model, RunSpec, phases_of
from loadtests.tenants import tenants
from nnsight_engine.modeling.bundled import bundled_model_path

_TIMEOUT_S: Final = 60.0
_NUM_MESSAGES: Final = 8
_DEFAULT_BODY_BYTES: Final = 2**27
_SENDS_MESSAGES: Final = ("trace-message", "jobs")


class LoadTestError(Exception):
    """A run that cannot begin; the message says what to do."""


class TestedServer:
    """A running server, and its admin key; empty if it requires no keys."""

    def __init__(self, url: str, admin_key: str) -> None:
        self.url = url
        self.admin_key = admin_key

    @contextlib.contextmanager
    def prepared_run(
        self, scenario: str, shape: str, seconds: float, counts: dict[str, int]
    ) -> Iterator[RunSpec]:
        """Prepare a run; its keys are valid within the block.

        Args:
            scenario: The name of the scenario.
            shape: One of ``SHAPES``.
            seconds: The duration.
            counts: The number of users per kind.

        Raises:
            LoadTestError: The run is not possible on this server.
        """
        kinds = set(counts)
        has_hostile = bool(kinds & set(HOSTILE))
        if has_hostile and not self.admin_key:
            raise LoadTestError(
                f"the scenario {scenario} has a hostile tenant, so the run creates keys and needs one with "
                "the scope `admin`: --admin-key-file FILE; or omit --url, which starts a server with keys"
            )
        with contextlib.ExitStack() as stack:
            client = stack.enter_context(httpx.Client(base_url=self.url, timeout=_TIMEOUT_S))
            try:
                keys = stack.enter_context(tenants(client, self.admin_key, kinds)) if self.admin_key else {}
                model = _model(client, next(iter(keys.values()), ""))
                messages = self._messages(client, model, keys) if kinds & set(_SENDS_MESSAGES) else []
            except httpx.HTTPStatusError as error:
                raise LoadTestError(f"{error}: {error.response.text}") from error
            except httpx.TransportError as error:
                raise LoadTestError(f"{self.url} does not answer: {error}") from error
            yield RunSpec(
                scenario=scenario,
                shape=shape,
                url=self.url,
                model=model,
                counts=counts,
                phases=phases_of(shape, has_hostile=has_hostile),
                seconds=seconds,
                keys=keys,
                messages=messages,
            )

    def _messages(self, client: httpx.Client, model: Model, keys: dict[str, str]) -> list[str]:
        key = keys.get(TENANT_OF[_SENDS_MESSAGES[0]], "")
        outline: dict[str, Any] = _get(client, "/v1/traces/outline", key)
        bodies = Bodies(model, "messages")
        return messages_of(model, outline, [bodies.prompt() for _ in range(_NUM_MESSAGES)], self.url)


@contextlib.contextmanager
def server_at(url: str, admin_key: str, options: Sequence[str]) -> Iterator[TestedServer]:
    """Yield the server at an address, or start one with keys if none is listening there.

    A server that was started is stopped at the end of the block.

    Args:
        url: The address; empty for a free port on this machine.
        admin_key: A key with the scope ``admin`` of a running server.
        options: Options of ``nnsight-engine serve`` for a server to start; without a model, the bundled one.

    Raises:
        LoadTestError: No server is listening, and the address is on another machine.
        ServerError: The server does not start.
    """
    if url and _listens(url):
        yield TestedServer(url.rstrip("/"), admin_key)
        return
    if url and not is_loopback(urlsplit(url).hostname or ""):
        raise LoadTestError(
            f"no server listens at {url}, and one can be started on this machine only; start it there"
        )
    with tempfile.TemporaryDirectory() as folder:
        variables = own_folders(folder)
        operator = created_key("operator", variables, "--scopes", "admin")
        has_model = bool(options) and not options[0].startswith("-")
        model = [] if has_model else [str(bundled_model_path())]
        with served([*model, *options], variables, urlsplit(url).port if url else None) as started:
            yield TestedServer(started, operator)


def _listens(url: str) -> bool:
    try:
        httpx.get(f"{url}/health/live", timeout=_TIMEOUT_S)
    except httpx.ConnectError:
        return False
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise LoadTestError(f"{url} answers, but not as an NNsight Engine: {error}") from error
    return True


def _model(client: httpx.Client, key: str) -> Model:
    capabilities = Capabilities.model_validate(_get(client, "/v1/capabilities", key))
    return Model(
        name=capabilities.model,
        num_layers=capabilities.sizes.num_layers,
        width=capabilities.sizes.hidden_size,
        vocab_size=capabilities.sizes.vocab_size,
        max_model_len=capabilities.sizes.max_model_len,
        max_body_bytes=capabilities.limits.max_body_bytes or _DEFAULT_BODY_BYTES,
    )


def _get(client: httpx.Client, path: str, key: str) -> Any:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return client.get(path, headers=headers).raise_for_status().json()


__all__ = ["LoadTestError", "TestedServer", "server_at"]
