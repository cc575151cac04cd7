"""Every route, tried by everybody: without a key, with a wrong one, without the scope, and as another tenant.

A new route that is open, or gives something of no id, is named here, or the first test fails; one with a
new kind of id in its path gives it a maker in ``Theirs``.
"""

from __future__ import annotations

import enum
import itertools
import secrets
from collections.abc import AsyncIterator
from typing import Any, Final

import httpx
import pytest

from api_schemas.administration import Scope
from app.auth.keys import new_secret
from tests.fakes.results import MODEL
from tests.integration.conftest import ErrorCheck, Serve
from tests.integration.scripted_traces import HEADERS, ScriptedEngine, trace
from tests.integration.served_routes import ROUTES, SOCKET, Served
from tests.integration.tenants import Tenants
from tests.integration.test_stored_kinds import DETECTORS, DICTIONARIES, PRESETS, VECTORS, Kind


class Access(enum.Enum):
    """Whose data a route gives, takes, or works on."""

    OPEN = "nobody's: it asks for no key"
    SAME = "nobody's: all tenants are told the same"
    SUMMED = "nobody's: sums over all tenants, for keys with the scope metrics"
    MADE = "the caller's own, and new"
    LISTED = "the caller's own, all of it"
    NAMED = "the caller's own, by an id in the path"
    OPERATORS = "all tenants', for keys with the scope admin"


OPEN: Final = {
    "GET /", "GET /openapi.json", "GET /docs", "GET /docs/assets/{name}", "GET /redoc", "GET /playground",
    "GET /playground/assets/{name}", "GET /health/live", "GET /health/ready", "GET /health", "GET /ping",
    "POST /ping",
}  # fmt: skip
SAME: Final = {
    "GET /version", "GET /tokenizer_info", "GET /v1/capabilities", "GET /v1/status", "GET /v1/traces/outline",
}  # fmt: skip


def access(route: Served) -> Access:
    """Return whose data a route gives: by its name, its scopes, or the id in its path."""
    if str(route) in OPEN:
        return Access.OPEN
    if str(route) in SAME:
        return Access.SAME
    if str(route) in QUERIES:
        return Access.LISTED
    scopes = route.scopes or ()
    if {Scope.ADMIN, Scope.METRICS} & set(scopes):
        return Access.OPERATORS if Scope.ADMIN in scopes else Access.SUMMED
    return Access.NAMED if "{" in route.path else Access.MADE


UNPRIVILEGED: Final = tuple(scope for scope in Scope if scope is not Scope.ADMIN)
IGNORED: Final = "ignored"
"""A query that a route does not have."""
QUERIES: Final = {
    "GET /v1/jobs": {"after": "job_id"},
    "GET /v1/vectors": {"after": "vector_id"},
    "GET /v1/detectors": {"after": "detector_id"},
    "GET /v1/dictionaries": {"after": "dictionary_id"},
    "GET /v1/presets": {"after": "preset_id"},
    "GET /v1/models": {IGNORED: "preset"},
}
"""Where else than in its path a route takes an id; models are listed with the names of presets."""
CLOSED: Final = [route for route in ROUTES if access(route) is not Access.OPEN]
NAMED: Final = [route for route in ROUTES if access(route) is Access.NAMED]
OWN: Final = {"content-length", "x-request-id"}
"""Headers that every answer has its own of."""


class Theirs:
    """What a tenant has, made as it does that."""

    def __init__(self, tenants: Tenants, headers: dict[str, str]) -> None:
        self.tenants = tenants
        self.headers = headers

    async def make(self, kind: str) -> str:
        """Return the id of a new one; ``kind`` is what routes call it in their paths."""
        made: str = await getattr(self, f"_{kind}")()
        return made

    async def _job_id(self) -> str:
        content = trace("ok")
        answer = await self.tenants.send("POST", "/v1/jobs", {**self.headers, **HEADERS}, content=content)
        job_id = str(answer.json()["id"])
        # Until it has ended.
        await self.tenants.send("GET", f"/v1/jobs/{job_id}/events", self.headers)
        return job_id

    async def _kept(self, kind: Kind, field: str = "id") -> str:
        made = await kind.make(self.tenants.server, self.headers, name=f"calm-{secrets.token_hex(8)}")
        return str(made[field])

    async def _vector_id(self) -> str:
        return await self._kept(VECTORS)

    async def _detector_id(self) -> str:
        return await self._kept(DETECTORS)

    async def _dictionary_id(self) -> str:
        return await self._kept(DICTIONARIES)

    async def _preset_id(self) -> str:
        return await self._kept(PRESETS)

    async def _preset(self) -> str:
        return await self._kept(PRESETS, "name")

    async def _model(self) -> str:
        return f"{MODEL}:{await self._preset()}"

    async def _response_id(self) -> str:
        answer = await self.tenants.send("POST", "/v1/responses", self.headers, json={"input": "one"})
        return str(answer.json()["id"])

    async def _result_id(self) -> str:
        body = {
            "prompt": "one two",
            "interventions": [{"op": "capture", "at": "layers.1.output", "name": "kept"}],
        }
        answer = await self.tenants.send("POST", "/v1/completions", self.headers, json=body)
        results = answer.json()["choices"][0]["interventions"]["results"]
        (point,) = results["kept"]["points"].values()
        return str(point["url"]).rsplit("/", 1)[1]


@pytest.fixture
async def tenants(serve: Serve) -> AsyncIterator[Tenants]:
    async with serve(traces={"vllm": ScriptedEngine()}, inline_tensor_bytes=0) as server:
        found = Tenants(server)
        await found.headers("operator", Scope.ADMIN)
        yield found


async def knock(
    tenants: Tenants, route: Served, ids: dict[str, str], headers: dict[str, str] | None = None
) -> httpx.Response:
    """Ask a route, of whichever kind, and return its answer; 101 is a socket that was opened."""
    path = route.path.format(**ids)
    if route.method == SOCKET:
        return await tenants.open_socket(path, headers or {})
    raw = [(name.encode(), value.encode("latin-1")) for name, value in (headers or {}).items()]
    return await tenants.server.client.request(route.method, path, headers=raw)


def nothing(route: Served) -> dict[str, str]:
    """Return ids for a path that nothing has."""
    names = itertools.chain(*(part.split("}")[:1] for part in route.path.split("{")[1:]))
    return {name: secrets.token_urlsafe(24) for name in names}


def test_every_route_asks_for_a_key_unless_it_is_open_and_gives_nothing_but_what_is_known_here():
    assert {str(route) for route in ROUTES} >= OPEN | SAME | set(QUERIES)
    for route in ROUTES:
        assert (route.scopes is None) == (access(route) is Access.OPEN), route
        assert access(route) is not Access.MADE or route.method in {"POST", "PUT"}, f"what does {route} give?"
    assert {scope for route in CLOSED for scope in route.scopes or ()} == set(Scope)


async def test_every_route_requires_a_key(tenants: Tenants, error_of: ErrorCheck, subtests: pytest.Subtests):
    unknown = ["Bearer nns_x", f"Bearer {new_secret().text}", "Bearer \xff", "Basic eDp5"]
    for route in CLOSED:
        with subtests.test(str(route)):
            ids = nothing(route)
            error_of(await knock(tenants, route, ids), 401, "missing_api_key")
            for sent in unknown:
                answer = await knock(tenants, route, ids, {"authorization": sent})
                error_of(answer, 401, "missing_api_key" if sent[:5] == "Basic" else "invalid_api_key")
                assert answer.headers["www-authenticate"].startswith("Bearer")


async def test_a_key_opens_what_its_scopes_say_and_nothing_else(
    tenants: Tenants, error_of: ErrorCheck, subtests: pytest.Subtests
):
    alone = {scope: await tenants.headers("acme", scope) for scope in Scope}
    others = {
        scope: await tenants.headers("acme", *(other for other in Scope if other is not scope))
        for scope in Scope
    }
    for route in CLOSED:
        assert route.scopes is not None
        with subtests.test(str(route)):
            for scope, headers in alone.items():
                answer = await knock(tenants, route, nothing(route), headers)
                if set(route.scopes) <= {scope}:
                    assert answer.status_code not in {401, 403}, answer.text
                else:
                    error_of(answer, 403, "missing_scope")
            just_those = await tenants.headers("acme", *route.scopes) if route.scopes else alone[Scope.CODE]
            answer = await knock(tenants, route, nothing(route), just_those)
            assert answer.status_code not in {401, 403}, answer.text
            for scope in route.scopes:
                answer = await knock(tenants, route, nothing(route), others[scope])
                error_of(answer, 403, "missing_scope")


@pytest.mark.both_databases
async def test_what_is_named_by_its_id_is_there_for_its_tenant_alone(tenants: Tenants):
    ours, colleagues = [await tenants.headers("acme", *UNPRIVILEGED) for _ in range(2)]
    # An operator may look after keys, and still sees nobody's data.
    rivals = [await tenants.headers("rival"), await tenants.headers("operator")]
    mine = Theirs(tenants, ours)
    assert len(NAMED) >= 8
    for route in NAMED:
        missing = nothing(route)
        made = {name: await mine.make(name) for name in missing}
        assert not set(made.values()) & set(missing.values())
        await tenants.server.until_idle()
        for rival in rivals:
            refused = await knock(tenants, route, made, rival)
            unknown = await knock(tenants, route, missing, rival)
            assert (refused.status_code, unknown.status_code) == (404, 404), route
            # Nothing but the id itself tells one that is somebody's from one that is nobody's.
            assert without(refused, made) == without(unknown, missing), route
        # And nothing has become of it.
        assert (await knock(tenants, route, made, colleagues)).status_code not in {401, 403, 404}, route


@pytest.mark.both_databases
async def test_lists_have_only_a_tenants_own_items_for_every_query(tenants: Tenants):
    ours, theirs = [await tenants.headers(name, *UNPRIVILEGED) for name in ("acme", "rival")]
    for route in ROUTES:
        if access(route) is not Access.LISTED:
            continue
        queries = QUERIES[str(route)]
        made = {query: await Theirs(tenants, ours).make(kind) for query, kind in queries.items()}
        for one in made.values():
            assert one in (await tenants.send(route.method, route.path, ours)).text
            assert one not in (await tenants.send(route.method, route.path, theirs)).text
        for query, one in made.items():
            answer = await tenants.send(route.method, route.path, theirs, params={query: one})
            unknown = await tenants.send(route.method, route.path, theirs, params={query: "x" * len(one)})
            expected = 200 if query == IGNORED else 404
            assert (answer.status_code, unknown.status_code) == (expected, expected)


async def test_public_answers_are_the_same_for_all_tenants(tenants: Tenants):
    ours, theirs = [await tenants.headers(name, *UNPRIVILEGED) for name in ("acme", "rival")]
    await Theirs(tenants, ours).make("job_id")
    await tenants.server.until_idle()
    for route in ROUTES:
        if access(route) is Access.SAME:
            answers = [await knock(tenants, route, {}, headers) for headers in (ours, theirs)]
            told = [{**answer.json(), "uptime_s": 0} for answer in answers]
            assert told[0] == told[1], route
            assert "acme" not in answers[1].text


def without(answer: httpx.Response, ids: dict[str, str]) -> Any:
    text = answer.text
    for name, one in ids.items():
        text = text.replace(one, name)
    return text, {name: value for name, value in answer.headers.items() if name not in OWN}
