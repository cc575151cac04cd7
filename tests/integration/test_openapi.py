"""The server does what its OpenAPI document says, for requests made up from the document and for broken ones.

Schemathesis makes them up, always the same ones, and checks each answer: no 5xx, and status, content type,
headers and body as documented; what the document allows is accepted, and what it does not is refused.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from hypothesis.stateful import run_state_machine_as_test
from schemathesis import CheckFunction, GenerationMode
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

from api_schemas.administration import NewKey, Scope, Tier
from app.auth.keys import Keys
from app.http.openapi import LINKS
from app.http.vllm_routes import EMBEDDINGS, MESSAGES, RESPONSES
from app.storage.database import Database
from app.storage.keys import KeyStore
from nnsight_engine.remote_backend.messages import MEDIA_TYPE
from tests.integration.dictionary_files import cfg, text_weights
from tests.integration.live import listening
from tests.integration.scripted_traces import HEADERS, ScriptedEngine, trace
from tests.integration.serving import Application
from tests.integration.test_stored_kinds import DETECTORS, PRESETS, VECTORS

HEAVY: Final = pytest.param(20, marks=pytest.mark.heavy)
FEW_OR_MANY: Final = pytest.mark.parametrize("num", [3, HEAVY])
NUM_SUITES: Final = 2
STORIES: Final = settings(
    database=None,
    deadline=None,
    max_examples=6,
    stateful_step_count=8,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
FAMILIES: Final = [
    "/v1/jobs", "/v1/admin", "/v1/vectors(?!/train)", "/v1/detectors(?!/train)", "/v1/dictionaries",
    "/v1/presets",
]  # fmt: skip
SCRIPTS: Final = ["ok", "logs:2", "refused", "block-fails"]

# The document says that a trace is bytes; which bytes, docs/remote.md does. Other tests send broken ones.
schemathesis.openapi.media_type(MEDIA_TYPE, st.sampled_from([trace(script) for script in SCRIPTS[:3]]))

SWITCHED_OFF: Final[dict[str, list[CheckFunction]]] = {
    # The document does not know the model, whose layers and width a vector must fit.
    "/v1/vectors": [positive_data_acceptance],
    "/v1/vectors/train": [positive_data_acceptance],
    "/v1/detectors": [positive_data_acceptance],
    "/v1/detectors/train": [positive_data_acceptance],
    "/v1/presets": [positive_data_acceptance],
    "/v1/sweeps": [positive_data_acceptance],
    "/v1/dictionaries": [positive_data_acceptance],
    "/v1/dictionaries/{dictionary_id}/labels": [positive_data_acceptance],
    # JSON Schema takes 1.0 for an integer, and no list of ids does.
    "/v1/tokenize": [positive_data_acceptance],
    # The document leaves OpenAI's fields to vLLM, which is not here, and points to the model.
    "/v1/completions": [positive_data_acceptance, negative_data_rejection],
    "/v1/chat/completions": [positive_data_acceptance, negative_data_rejection],
    **{
        path: [positive_data_acceptance, negative_data_rejection]
        for path in (RESPONSES, MESSAGES, *EMBEDDINGS)
    },
}


def application(folder: Path, database_url: str = "") -> Any:
    traces = {"vllm": ScriptedEngine()}
    return Application(
        folder, traces=traces, database_url=database_url, allow_code=True, drain_timeout_s=0
    ).app


DOCUMENT: Final = application(Path("never started")).openapi()
OPERATIONS: Final = [
    (method.upper(), path) for path, methods in DOCUMENT["paths"].items() for method in methods
]


def can_be_broken(method: str, path: str) -> bool:
    """Whether the document forbids something: any text is a path's parameter, and any bytes are a trace."""
    operation = DOCUMENT["paths"][path][method.lower()]
    places = {parameter["in"] for parameter in operation.get("parameters", [])}
    body = operation.get("requestBody", {"content": {}})["content"]
    return bool(places & {"query", "header"}) or "application/json" in body


@contextlib.contextmanager
def served(folder: Path, database_url: str = "") -> Iterator[tuple[str, dict[str, str]]]:
    """Serve in a thread; yields the address, and the header of a key that opens everything."""

    async def made() -> str:
        database = Database(folder / "data", database_url)
        await database.start()
        new = NewKey(tenant="acme", scopes=tuple(Scope), tier=Tier.TRUSTED)
        created = await Keys(KeyStore(database)).create(new)
        await database.close()
        return created.key

    # With a key the server asks everybody for one.
    key = {"Authorization": f"Bearer {asyncio.run(made())}"}
    with listening(application(folder, database_url)) as url:
        yield url, key


def document_of(url: str) -> Any:
    said = httpx.get(f"{url}/openapi.json").json()
    for methods in said["paths"].values():
        for operation in methods.values():
            # Every request has a key; what becomes of those without is in test_tenant_matrix.
            operation.pop("security", None)
    loaded = schemathesis.openapi.from_dict(said)
    loaded.config.update(base_url=url)
    # Links are those that the document says: a guessed one would revoke the key of all this.
    loaded.config.phases.stateful.inference.algorithms = []
    return loaded


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, str]]]:
    with served(tmp_path_factory.mktemp("openapi")) as found:
        yield found


@pytest.fixture(scope="module")
def url(server: tuple[str, dict[str, str]]) -> str:
    return server[0]


@pytest.fixture(scope="module")
def key(server: tuple[str, dict[str, str]]) -> dict[str, str]:
    return server[1]


@pytest.fixture(scope="module")
def document(url: str) -> Any:
    return document_of(url)


def check_all(
    document: Any,
    method: str,
    path: str,
    mode: GenerationMode,
    key: dict[str, str],
    num: int,
    url: str | None = None,
) -> None:
    @settings(
        derandomize=True,
        database=None,
        deadline=None,
        max_examples=num,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        case=document[path][method].as_strategy(generation_mode=mode),
        script=st.none() if url is None else st.sampled_from(SCRIPTS),
    )
    def check(case: schemathesis.Case[Any], script: str | None) -> None:
        if script is not None:
            answer = httpx.post(f"{url}/v1/jobs", content=trace(script), headers={**HEADERS, **key})
            case.path_parameters["job_id"] = answer.json()["id"]
        case.call_and_validate(headers=key, excluded_checks=SWITCHED_OFF.get(path, []))

    check()


@pytest.mark.heavy
@pytest.mark.both_databases
def test_what_answers_lead_to_is_as_the_document_says(tmp_path: Path, database_url: str):
    with served(tmp_path, database_url) as (url, key):
        for family in FAMILIES:
            failures, statuses = stories(url, key, family)
            assert failures == []
            linked = {to for links in LINKS.values() for to in links if re.match(family, to.split()[1])}
            # Which links are followed is chance; that most of them lead somewhere is not.
            found = {route for route in linked if statuses[route] - {404, 422}}
            assert len(found) > len(linked) / 2, linked - found


def give_fitting_body(case: schemathesis.Case[Any]) -> None:
    """Replace bodies that must fit the model, or each other: the document does not know either."""
    match case.operation.label:
        case "POST /v1/vectors" | "POST /v1/detectors":
            kind = VECTORS if "vectors" in case.operation.label else DETECTORS
            case.media_type, case.body = "application/json", {"name": "joy", **kind.body(0)}
        case "POST /v1/dictionaries":
            case.media_type = "multipart/form-data"
            case.body = {"name": "sae", "weights": text_weights(), "cfg": cfg().decode()}
        case "PUT /v1/dictionaries/{dictionary_id}/labels":
            case.media_type, case.body = "application/json", {"3": "cats"}
        case "POST /v1/presets" | "PUT /v1/presets":
            # Of two versions one is left behind a deletion.
            name = f"calm-{secrets.token_hex(8)}"
            case.body = {"name": name, **PRESETS.body(0)}


def stories(url: str, key: dict[str, str], family: str) -> tuple[list[BaseException], dict[str, set[int]]]:
    """Follow links from request to request; returns what was wrong, and each operation's statuses."""
    failures: list[BaseException] = []
    statuses: collections.defaultdict[str, set[int]] = collections.defaultdict(set)

    class Story(document_of(url).include(path_regex=family).as_state_machine()):  # type: ignore[misc]
        """Requests that follow each other, of a tenant that nobody was before."""

        def setup(self) -> None:
            new = {"tenant": f"story-{secrets.token_hex(8)}", "scopes": list(Scope), "tier": "trusted"}
            self.key = httpx.post(f"{url}/v1/admin/keys", json=new, headers=key).json()["key"]

        def before_call(self, case: schemathesis.Case[Any]) -> None:
            is_made_wrong = case.meta is not None and case.meta.generation.mode.is_negative
            if not is_made_wrong:
                give_fitting_body(case)

        def get_call_kwargs(self, case: schemathesis.Case[Any]) -> dict[str, Any]:
            return {"headers": {"Authorization": f"Bearer {self.key}"}, "timeout": 10}

        def validate_response(
            self, response: schemathesis.Response, case: schemathesis.Case[Any], **rest: Any
        ) -> None:
            statuses[case.operation.label].add(response.status_code)
            try:
                super().validate_response(response, case, **rest)
            except BaseExceptionGroup as group:
                failures.append(group)

    for number in range(NUM_SUITES):
        # Another path through the same choices, where a job ended sooner than the last time, is no failure.
        with contextlib.suppress(Flaky):
            run_state_machine_as_test(seed(number)(Story), settings=STORIES)
    return failures, statuses


@FEW_OR_MANY
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_what_the_document_allows_is_answered_as_it_says(
    document: Any, method: str, path: str, key: dict[str, str], num: int
) -> None:
    check_all(document, method, path, GenerationMode.POSITIVE, key, num)


@FEW_OR_MANY
@pytest.mark.parametrize(("method", "path"), [each for each in OPERATIONS if can_be_broken(*each)])
def test_what_the_document_forbids_is_refused_as_it_says(
    document: Any, method: str, path: str, key: dict[str, str], num: int
) -> None:
    check_all(document, method, path, GenerationMode.NEGATIVE, key, num)


@FEW_OR_MANY
@pytest.mark.parametrize(("method", "path"), [each for each in OPERATIONS if "{job_id}" in each[1]])
def test_jobs_that_are_there_are_as_the_document_says(
    document: Any, url: str, method: str, path: str, key: dict[str, str], num: int
) -> None:
    check_all(document, method, path, GenerationMode.POSITIVE, key, num, url)
