"""What vectors, detectors, dictionaries and presets have in common: names, versions, lists, tenants, room."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import pytest

from api_schemas.administration import Scope
from api_schemas.errors import ErrorCode
from app.catalog.catalog import Catalog
from app.observability import metrics
from tests.integration import vector_files
from tests.integration.conftest import ErrorCheck, Serve, Server
from tests.integration.detector_files import as_file, random_detector
from tests.integration.dictionary_files import cfg, weights
from tests.integration.tenants import Tenants
from tests.monitoring import OURS, Exposition

USER: Final = (Scope.COMPLETIONS, Scope.INTERVENTIONS)
AT: Final = "layers.1.output"
NAME: Final = "calm"


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of things that are kept by name.

    Attributes:
        body: Makes what is sent, of a number that it has in it.
        uses: Makes the fields of a completion that uses one by its name.
        parts: What else is read of one.
        prefix: Of its ids; those of presets are no part of any path.
        store: Where the setting, the code and the count of stored bytes have their names from.
        in_forms: Whether it comes as a form alone.
    """

    one: str
    many: str
    prefix: str
    store: str
    body: Callable[[int], dict[str, Any]]
    uses: Callable[[Any], dict[str, Any]]
    parts: tuple[str, ...] = ("/content",)
    in_forms: bool = False

    def __str__(self) -> str:
        return self.many

    @property
    def route(self) -> str:
        return f"/v1/{self.many}"

    def path(self, made: dict[str, Any]) -> str:
        return (
            f"{self.route}/{made['name']}@{made['version']}"
            if self is PRESETS
            else f"{self.route}/{made['id']}"
        )

    async def post(self, server: Server, headers: Any = None, number: int = 0, **more: Any) -> httpx.Response:
        fields = {"name": NAME, **more}
        if self.in_forms:
            form = {name: str(value).lower() if value is True else value for name, value in fields.items()}
            return await server.client.post(self.route, data=form, headers=headers, **self.body(number))
        body = {**self.body(number), **fields}
        return await server.client.post(self.route, json=body, headers=headers)

    async def make(self, server: Server, headers: Any = None, number: int = 0, **more: Any) -> dict[str, Any]:
        answer = await self.post(server, headers, number, **more)
        assert answer.status_code == 201, answer.text
        made: dict[str, Any] = answer.json()
        return made

    async def listed(self, server: Server, headers: Any = None, **query: Any) -> list[dict[str, Any]]:
        data: list[dict[str, Any]] = (
            await server.client.get(self.route, params=query, headers=headers)
        ).json()["data"]
        return data

    def used_bytes(self, server: Server) -> int:
        used: int = getattr(server.context, self.many).used_bytes
        return used

    async def used(self, server: Server, name: Any, headers: Any = None) -> Any:
        """Return which one a completion uses by a name, None where there is none."""
        body = {"prompt": "one two", "max_tokens": 1, **self.uses(name)}
        answer = await server.client.post("/v1/completions", json=body, headers=headers)
        if not answer.is_success:
            assert answer.json()["error"]["code"] in {f"unknown_{self.one}", "preset_not_found"}, answer.text
            return None
        return self.applied(answer.json())

    def applied(self, answer: dict[str, Any]) -> Any:
        """Return which one was used for an answer: its id, of presets the name of what it captures."""
        done = answer["choices"][0]["interventions"]
        if self is PRESETS:
            return next(iter(done["results"]))
        (applied,) = done["applied"]
        return applied["vector"]["id"] if self is VECTORS else applied[self.many][0]["id"]


def own_id(kind: Kind, made: dict[str, Any]) -> Any:
    """Return what ``used`` gives of one."""
    return made["interventions"][0]["name"] if kind is PRESETS else made["id"]


VECTORS: Final = Kind(
    "vector",
    "vectors",
    "vec_",
    "vector",
    lambda number: {"vectors": {"1": [1.0 + number] * 8, "2": [0.5] * 8}},
    lambda name: {"interventions": [{"op": "steer", "at": AT, "vector": named(name)}]},
)
DETECTORS: Final = Kind(
    "detector",
    "detectors",
    "det_",
    "vector",
    lambda number: {"parts": [{"at": AT, "form": "linear", "weights": [1.0 + number] * 8}], "threshold": 0.5},
    lambda name: {"interventions": [{"op": "detect", "detector": name}]},
)
DICTIONARIES: Final = Kind(
    "dictionary",
    "dictionaries",
    "dict_",
    "dictionary",
    lambda number: {"files": {"weights": ("w.safetensors", weights(number)), "cfg": ("cfg.json", cfg())}},
    lambda name: {"interventions": [{"op": "features", "dictionary": name, "top_k": 1}]},
    ("/content", "/config", "/features"),
    in_forms=True,
)
PRESETS: Final = Kind(
    "preset",
    "presets",
    "pre_",
    "preset",
    lambda number: {"interventions": [{"op": "capture", "at": AT, "name": f"kept_{number}"}]},
    lambda name: {"preset": name},
    (),
)
KINDS: Final = [VECTORS, DETECTORS, DICTIONARIES, PRESETS]
WITH_IDS: Final = [VECTORS, DETECTORS, DICTIONARIES]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=str)


def named(name: Any) -> Any:
    return name if isinstance(name, dict) else {"name": name}


@every_kind
@pytest.mark.both_databases
async def test_names_have_versions_that_never_come_back(server: Server, kind: Kind) -> None:
    first, second = await kind.make(server), await kind.make(server, number=1)
    assert (first["version"], second["version"], first["own"], first["shared"]) == (1, 2, True, False)
    assert first["id"].startswith(kind.prefix)
    assert [await kind.used(server, f"{NAME}{version}") for version in ("", "@1", "@2", "@3", "@0")] == [
        own_id(kind, second), own_id(kind, first), own_id(kind, second), None, None,
    ]  # fmt: skip
    assert (await server.client.delete(kind.path(second))).status_code == 204
    assert (await kind.make(server))["version"] == 3
    together = await asyncio.gather(*(kind.make(server, name="many") for _ in range(8)))
    assert sorted(made["version"] for made in together) == list(range(1, 9))


@every_kind
@pytest.mark.both_databases
async def test_lists_come_in_pages_and_what_is_removed_is_gone(
    server: Server, error_of: ErrorCheck, kind: Kind
) -> None:
    made = [await kind.make(server, name=name) for name in (NAME, "brief", NAME)]
    first = (await server.client.get(kind.route, params={"limit": 2})).json()
    assert [one["id"] for one in first["data"]] == [made[2]["id"], made[1]["id"]]
    assert first["has_more"]
    rest = (await server.client.get(kind.route, params={"after": first["last_id"]})).json()
    assert ([one["id"] for one in rest["data"]], rest["has_more"]) == ([made[0]["id"]], False)
    assert rest["data"][0].items() <= made[0].items()
    assert [one["version"] for one in await kind.listed(server, name=NAME)] == [2, 1]
    path, code = kind.path(made[0]), f"{kind.one}_not_found"
    assert (await server.client.get(path)).json() == made[0]
    unknown = await server.client.get(kind.route, params={"after": f"{kind.prefix}0"})
    error_of(unknown, 404, code)
    assert (await server.client.delete(path)).status_code == 204
    for method, part in (("DELETE", ""), ("GET", ""), *(("GET", part) for part in kind.parts)):
        error_of(await server.client.request(method, f"{path}{part}"), 404, code)


@every_kind
@pytest.mark.both_databases
async def test_they_outlive_the_server(serve: Serve, kind: Kind) -> None:
    async with serve() as server:
        made = await kind.make(server)
    async with serve() as server:
        assert (await server.client.get(kind.path(made))).json() == made
        assert await kind.used(server, NAME) == own_id(kind, made)


@every_kind
async def test_what_is_no_name_is_refused_and_leaves_nothing(
    server: Server, error_of: ErrorCheck, kind: Kind
) -> None:
    wrong: list[dict[str, Any]] = [{"name": one} for one in ("Calm", "calm@2", "a" * 65)]
    for more in (*wrong, {"shared": "maybe"}):
        error_of(await kind.post(server, **more), 422, "invalid_shape")
    code = (400, "bad_request") if kind.in_forms else (422, "invalid_shape")
    error_of(await kind.post(server, mood="x"), *code)
    error_of(await kind.post(server, shared=True), 401, "missing_api_key")  # who would own it?
    assert await kind.listed(server) == []
    assert kind.used_bytes(server) == 0


@every_kind
@pytest.mark.both_databases
async def test_a_tenant_sees_its_own_and_shared_ones(
    tenants: Tenants, error_of: ErrorCheck, kind: Kind
) -> None:
    server, client = tenants.server, tenants.server.client
    operator, second = await tenants.headers("operator"), await tenants.headers("second")
    acme, other = [await tenants.headers(name, *USER) for name in ("acme", "other")]
    own = await kind.make(server, acme, name="mine")
    shared = await kind.make(server, operator, shared=True)
    hidden = await kind.make(server, operator, name="hidden")
    code = f"{kind.one}_not_found"
    for made in (own, hidden):
        for method, part in (("DELETE", ""), ("GET", ""), *(("GET", part) for part in kind.parts)):
            error_of(await client.request(method, f"{kind.path(made)}{part}", headers=other), 404, code)
        assert await kind.used(server, made["name"], other) is None
    error_of(await client.get(kind.route, params={"after": own["id"]}, headers=other), 404, code)
    listed = await kind.listed(server, other)
    assert [(one["id"], one["own"], one["shared"]) for one in listed] == [(shared["id"], False, True)]
    for part in kind.parts:
        assert (await client.get(f"{kind.path(shared)}{part}", headers=other)).status_code == 200
    error_of(await client.delete(kind.path(shared), headers=acme), 403, "missing_scope")
    error_of(await kind.post(server, acme, shared=True), 403, "missing_scope")
    error_of(await kind.post(server, second, shared=True), 409, f"{kind.one}_name_taken")
    assert (await client.delete(kind.path(shared), headers=second)).status_code == 204
    assert kind.used_bytes(server) == own["bytes"] + hidden["bytes"]


@every_kind
async def test_uses_are_counted_by_the_names_of_shared_ones(
    tenants: Tenants, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    monkeypatch.setattr(metrics, "_MAX_NAMES", 2)
    server, operator = tenants.server, await tenants.headers("operator")
    acme = await tenants.headers("acme", *USER)
    await kind.make(server, acme, name="mine")
    for name in ("first", "second", "third"):
        await kind.make(server, operator, name=name, shared=True)
    for name in ("first", "mine", "second@1", "third", "first"):
        assert await kind.used(server, name, acme) is not None
    assert await kind.used(server, "none", acme) is None
    await server.until_idle()
    told = Exposition((await server.client.get("/metrics", headers=operator)).text)
    counted = {
        label: told.value(f"{OURS}{kind.one}_requests_total", **{kind.one: label})
        for label in told.values(f"{OURS}{kind.one}_requests_total", kind.one)
    }
    assert counted == {"first": 2, "second": 1, "other": 1, "own": 1}
    assert "mine" not in told.text


@every_kind
async def test_without_keys_uses_are_counted_by_every_name(server: Server, kind: Kind) -> None:
    await kind.make(server)
    assert await kind.used(server, NAME) is not None
    told = Exposition((await server.client.get("/metrics")).text)
    assert told.values(f"{OURS}{kind.one}_requests_total", kind.one) == {NAME}


@every_kind
@pytest.mark.both_databases
async def test_a_version_never_comes_to_mean_another_thing(
    tenants: Tenants, error_of: ErrorCheck, kind: Kind
) -> None:
    server, client = tenants.server, tenants.server.client
    operator, second = await tenants.headers("operator"), await tenants.headers("second")
    acme, other = [await tenants.headers(name, *USER) for name in ("acme", "other")]

    async def meant(headers: dict[str, str]) -> list[Any]:
        return [await kind.used(server, name, headers) for name in (NAME, f"{NAME}@1", f"{NAME}@2")]

    shared = [await kind.make(server, operator, number, shared=True) for number in (1, 2)]
    one, two = [own_id(kind, made) for made in shared]
    assert await meant(acme) == await meant(other) == [two, one, two]
    own = [await kind.make(server, acme, 3)]
    first = own_id(kind, own[0])
    # The name is acme's now, and all its versions are.
    assert (await meant(acme), await meant(other)) == ([first, first, None], [two, one, two])
    own.append(await kind.make(server, acme, 4))
    for made, left in ((own[1], [first, first, None]), (own[0], [None] * 3)):
        assert (await client.delete(kind.path(made), headers=acme)).status_code == 204
        assert await meant(acme) == left
    # Nor does a shared one, once it is gone, become somebody else's.
    for made in shared:
        assert (await client.delete(kind.path(made), headers=operator)).status_code == 204
    error_of(await kind.post(server, second, shared=True), 409, f"{kind.one}_name_taken")
    assert await meant(other) == [None] * 3
    assert (await kind.make(server, operator, shared=True))["version"] == 3


@pytest.mark.parametrize("kind", WITH_IDS, ids=str)
@pytest.mark.both_databases
async def test_a_name_with_an_id_means_that_one(tenants: Tenants, kind: Kind) -> None:
    server = tenants.server
    acme, other = [await tenants.headers(name, *USER) for name in ("acme", "other")]
    shared = await kind.make(server, await tenants.headers("operator"), shared=True)
    own, newer = [await kind.make(server, acme) for _ in range(2)]

    async def used(name: str, made: dict[str, Any], headers: Any = acme) -> Any:
        return await kind.used(server, {"name": name, "id": made["id"]}, headers)

    for made in (shared, own):
        assert await used(NAME, made) == await used(f"{NAME}@1", made) == made["id"]
    assert await used(f"{NAME}@2", newer) == newer["id"]
    assert await used(NAME, own, other) is None
    assert await used(f"{NAME}@2", own) is None
    assert await used("brief", own) is None
    assert await used(NAME, {"id": f"{kind.prefix}0"}) is None


@pytest.mark.parametrize("kind", WITH_IDS, ids=str)
@pytest.mark.both_databases
async def test_a_preset_uses_what_a_name_meant_when_it_was_made(
    tenants: Tenants, error_of: ErrorCheck, kind: Kind
) -> None:
    server, client = tenants.server, tenants.server.client
    operator, acme = await tenants.headers("operator"), await tenants.headers("acme", *USER)
    preset = {"name": "kept", **kind.uses(NAME)}
    error_of(await client.post("/v1/presets", json=preset, headers=acme), 400, f"unknown_{kind.one}")
    own = await kind.make(server, operator)
    assert (await client.post("/v1/presets", json=preset, headers=operator)).status_code == 201
    # One that all may use has what all may use.
    refused = await client.post("/v1/presets", json={**preset, "shared": True}, headers=operator)
    assert f"{NAME}@1" in error_of(refused, 400, f"unknown_{kind.one}")
    both = {"name": "both", "interventions": kind.uses("theirs")["interventions"], "shared": True}
    shared = await kind.make(server, operator, name="theirs", shared=True)
    assert (await client.post("/v1/presets", json=both, headers=operator)).status_code == 201
    for headers, name in ((operator, NAME), (acme, "theirs")):  # which mean others from now on
        await kind.make(server, headers, number=1, name=name)

    async def used(name: str, headers: Any) -> Any:
        body = {"prompt": "one", "max_tokens": 1, "preset": name}
        answer = await client.post("/v1/completions", json=body, headers=headers)
        return kind.applied(answer.json()) if answer.is_success else answer.json()["error"]["code"]

    assert await used("kept", operator) == own["id"]
    assert await used("both", acme) == await used("both", operator) == shared["id"]
    await client.delete(kind.path(own), headers=operator)
    assert await used("kept", operator) == f"unknown_{kind.one}"


@pytest.mark.parametrize("kind", [VECTORS, DETECTORS], ids=str)
@pytest.mark.both_databases
async def test_one_of_another_model_is_never_used(
    server: Server, error_of: ErrorCheck, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    made = await kind.make(server)
    with monkeypatch.context() as patch:
        patch.setattr("tests.fakes.engine.MODEL", "another-model")
        answer = await server.complete(**kind.uses(NAME))
        assert "'fake-model'" in error_of(answer, 400, f"{kind.one}_mismatch")
        again = await kind.make(server)
        assert await kind.used(server, NAME) == again["id"]
    assert (await kind.used(server, NAME), again["version"]) == (made["id"], 2)


@every_kind
@pytest.mark.both_databases
async def test_a_full_store_takes_no_more_and_no_tenant_fills_it(
    serve: Serve, error_of: ErrorCheck, kind: Kind
) -> None:
    async with serve() as server:
        made = await kind.make(server)
        num_bytes = made["bytes"]
        assert kind.used_bytes(server) == num_bytes > 32
        await server.client.delete(kind.path(made))
    setting, code = f"{kind.store}_store_bytes", f"{kind.store}_store_full"
    async with serve(**{setting: 2 * num_bytes - 1}) as server:
        made = await kind.make(server)
        error_of(await kind.post(server), 503, code)
        assert kind.used_bytes(server) == num_bytes
        await server.client.delete(kind.path(made))
        await server.client.delete(kind.path(await kind.make(server)))
    async with serve(**{setting: 3 * num_bytes}) as server:
        tenants = Tenants(server)
        acme, other = await tenants.headers("acme"), await tenants.headers("other")
        await kind.make(server, acme)
        assert "tenant 'acme'" in error_of(await kind.post(server, acme), 503, code)
        await kind.make(server, other)


@every_kind
async def test_they_count_among_a_tenants_stored_bytes(
    tenants: Tenants, error_of: ErrorCheck, kind: Kind
) -> None:
    operator, acme = await tenants.headers("operator"), await tenants.headers("acme", *USER)
    made = await kind.make(tenants.server, acme)
    limit = {"stored_bytes": 5 * made["bytes"] // 2}
    await tenants.send("PUT", "/v1/admin/tenants/acme/limits", operator, json=limit)
    answers = await asyncio.gather(*(kind.post(tenants.server, acme) for _ in range(4)))
    assert sorted(answer.status_code for answer in answers) == [201, 403, 403, 403]
    refused = next(one for one in answers if one.status_code == 403)
    assert kind.route in error_of(refused, 403, "stored_bytes_full")
    assert (await tenants.send("DELETE", kind.path(made), acme)).status_code == 204
    await kind.make(tenants.server, acme)


@pytest.mark.parametrize("kind", [VECTORS, DETECTORS], ids=str)
async def test_the_numbers_of_a_hot_one_are_read_once(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    read: list[int] = []
    original = Catalog.data

    async def counted(self: Any, number: int) -> Any:
        read.append(number)
        return await original(self, number)

    monkeypatch.setattr(Catalog, "data", counted)
    async with serve() as server:
        num_bytes = (await kind.make(server))["bytes"]
        brief = await kind.make(server, name="brief")
    async with serve(vector_cache_bytes=3 * num_bytes // 2) as server:
        # Two are more than there is room for: the one used last stays.
        for name in (NAME, NAME, "brief", NAME):
            assert await kind.used(server, name)
        assert read == [1, 2, 1]
        await server.client.delete(kind.path(brief))
        assert await kind.used(server, "brief") is None
    read.clear()
    async with serve(vector_cache_bytes=0) as server:
        assert [await kind.used(server, NAME) is None for _ in range(2)] == [False] * 2
        assert read == [1, 1]


FORM: Final = {"content-type": "multipart/form-data; boundary=x"}
PART: Final = '--x\r\ncontent-disposition: form-data; name="{}"; filename="f"\r\n\r\nx\r\n'


@pytest.mark.parametrize("kind", WITH_IDS, ids=str)
async def test_broken_forms_are_refused(server: Server, error_of: ErrorCheck, kind: Kind) -> None:
    file = PART.format("weights" if kind.in_forms else "file")
    for content in (
        "", "garbage", "--x--\r\n", file[:-5], file, f"{file}--y--", f"{PART.format('other')}--x--\r\n",
        f"{file * 2}--x--\r\n", "--x\r\n" + "a: b\r\n" * 5000 + "\r\n--x--", "--x\r\n\r\n\r\nx\r\n--x--",
    ):  # fmt: skip
        error_of(await server.client.post(kind.route, content=content, headers=FORM), 400, "bad_request")
    for kind_of_content in (
        "multipart/form-data", f"multipart/form-data; boundary={'x' * 999}", "application/octet-stream",
    ):  # fmt: skip
        headers = {"content-type": kind_of_content}
        error_of(await server.client.post(kind.route, content=file, headers=headers), 400, "bad_request")
    assert await kind.listed(server) == []


def good_files(kind: Kind, folder: Path) -> dict[str, bytes]:
    if kind is VECTORS:
        return {name: content for name, (_, content) in vector_files.good_files(folder).items()}
    if kind is DETECTORS:
        return {f"{seed}": as_file(*random_detector(seed)) for seed in range(8)}
    return {"w.safetensors": weights()}


def damaged(content: bytes, random: np.random.Generator) -> bytes:
    """Return a file whose head has other bits, which is cut off, or has a stretch of something else."""
    changed = bytearray(content)
    match random.integers(3):
        case 0:
            for place in random.integers(0, min(len(content), 400), random.integers(1, 5)):
                changed[place] ^= 1 << int(random.integers(8))
        case 1:
            del changed[int(random.integers(len(content))) :]
        case _:
            start, stop = sorted(map(int, random.integers(0, len(content), 2)))
            changed[start:stop] = random.bytes(int(random.integers(0, 40)))
    return bytes(changed)


@pytest.mark.parametrize("kind", WITH_IDS, ids=str)
async def test_damaged_files_are_taken_whole_or_refused_and_leave_nothing(
    server: Server, tmp_path: Path, kind: Kind
) -> None:
    random, num_refused = np.random.default_rng(0), 0
    files = good_files(kind, tmp_path)
    for name, content in [*files.items()] * (160 // len(files)):
        file = (name, damaged(content, random))
        sent = {"weights": file, "cfg": ("c", cfg())} if kind.in_forms else {"file": file}
        answer = await server.client.post(kind.route, files=sent, data={"name": NAME})
        if answer.status_code == 201:  # the damage is in what nothing reads
            await server.client.delete(kind.path(answer.json()))
        else:
            num_refused += 1
            assert answer.status_code in {400, 413, 415, 422}, (name, answer.text)
            assert answer.json()["error"]["code"] in set(ErrorCode)
        assert kind.used_bytes(server) == 0
    assert num_refused > 40


@every_kind
async def test_pages_of_other_origins_keep_nothing(server: Server, error_of: ErrorCheck, kind: Kind) -> None:
    for origin in ("https://elsewhere.example", "null"):
        error_of(await kind.post(server, {"origin": origin}), 403, "origin_not_allowed")
    await kind.make(server, {"origin": "http://localhost"})
