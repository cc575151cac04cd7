"""Stored dictionaries: uploads, versions, labels, searches, tenants; refusals leave nothing behind."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import httpx
import httpx2
import huggingface_hub
import numpy as np
import pytest
import safetensors.numpy
from starlette.requests import ClientDisconnect

from api_schemas.administration import Scope
from app.settings import Settings
from app.storage import dictionary_files
from app.storage.database import dictionary_folder
from tests.fakes.results import MODEL
from tests.integration.conftest import ErrorCheck, Serve, Server
from tests.integration.dictionary_files import CFG, NUM_FEATURES, cfg, numbers, weights
from tests.integration.tenants import Tenants
from tests.waiting import wait_for_async

ROUTE: Final = "/v1/dictionaries"
USER: Final = (Scope.INTERVENTIONS, Scope.COMPLETIONS)
LABELS: Final = {
    "0": "Dogs and cats",
    "3": "cats",
    "7": "a cat's Großmutter",
    "11": "100% wool_",
    "12": "dogs",
}


@pytest.fixture
def folder(tmp_path: Path, database_url: str) -> Path:
    return dictionary_folder(Settings(data_dir=tmp_path / "data", database_url=database_url))


def files_in(folder: Path) -> list[str]:
    """Return the names of all files of dictionaries, uploads included."""
    uploads = [path.name for path in folder.glob("uploads/*/*") if path.name != ".lock"]
    return sorted(uploads + [path.name for path in folder.iterdir() if path.is_file()])


async def upload(
    server: Server,
    content: bytes | None = None,
    config: bytes | None = None,
    *,
    file_name: str = "sae_weights.safetensors",
    labels: bytes | None = None,
    headers: Any = None,
    params: Any = None,
    **fields: str,
) -> httpx.Response:
    files = {
        "weights": (file_name, weights() if content is None else content, "application/octet-stream"),
        "cfg": ("cfg.json", cfg() if config is None else config, "application/json"),
    }
    if labels is not None:
        files["labels"] = ("labels", labels, "application/octet-stream")
    form = {"name": "sae", **fields}
    return await server.client.post(ROUTE, files=files, data=form, headers=headers, params=params)


async def make(server: Server, *given: Any, **more: Any) -> dict[str, Any]:
    answer = await upload(server, *given, **more)
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made


async def features(server: Server, dictionary_id: str, **query: Any) -> list[tuple[int, str | None]]:
    answer = await server.client.get(f"{ROUTE}/{dictionary_id}/features", params=query)
    assert answer.status_code == 200, answer.text
    return [(one["id"], one["label"]) for one in answer.json()["data"]]


async def nothing_is_there(server: Server, folder: Path) -> None:
    assert (await server.client.get(ROUTE)).json()["data"] == []
    assert files_in(folder) == []
    assert server.context.dictionaries.used_bytes == 0


@pytest.mark.both_databases
async def test_an_upload_comes_back_as_it_was(server: Server, folder: Path) -> None:
    made = await make(server)
    assert (made["name"], made["version"], made["own"], made["shared"]) == ("sae", 1, True, False)
    assert (made["architecture"], made["at"], made["output_at"]) == ("jumprelu", "layers.2.output", None)
    assert (made["input_width"], made["output_width"], made["num_features"]) == (8, 8, 16)
    assert (made["dtype"], made["num_labels"]) == ("float32", 0)
    assert made["sha256"] == hashlib.sha256(weights()).hexdigest()
    assert (made["weights_bytes"], made["bytes"]) == (len(weights()), len(weights()) + len(cfg()))
    assert made["id"].startswith("dict_")
    assert (await server.client.get(f"{ROUTE}/{made['id']}")).json() == made
    content = await server.client.get(f"{ROUTE}/{made['id']}/content")
    assert content.content == weights()
    part = await server.client.get(f"{ROUTE}/{made['id']}/content", headers={"Range": "bytes=8-15"})
    assert (part.status_code, part.content) == (206, weights()[8:16])
    config = await server.client.get(f"{ROUTE}/{made['id']}/config")
    assert config.content == cfg()
    assert files_in(folder) == [f"{made['sha256']}.safetensors"]
    assert server.context.dictionaries.used_bytes == made["bytes"]


async def test_fields_may_be_text_and_give_the_point(server: Server, error_of: ErrorCheck) -> None:
    file = {"weights": ("x", weights(), "application/octet-stream")}
    metadata = {**CFG["metadata"], "hook_name": "blocks.2.ln2.hook_normalized"}
    form = {"name": "sae", "cfg": json.dumps({**CFG, "metadata": metadata}), "labels": "id,label\n3,cats\n"}
    message = error_of(await server.client.post(ROUTE, files=file, data=form), 400, "invalid_dictionary")
    assert "give the point as `at`" in message
    answer = await server.client.post(ROUTE, files=file, data={**form, "at": "layers.-1.output"})
    assert (answer.status_code, answer.json()["at"]) == (201, "layers.3.output")
    assert await features(server, answer.json()["id"]) == [(3, "cats")]
    length = int.from_bytes(weights()[:8], "little")
    header = weights()[8 : 8 + length].ljust(0x0480)  # its length begins as a pickle does
    padded = len(header).to_bytes(8, "little") + header + weights()[8 + length :]
    assert (await upload(server, padded)).status_code == 201


async def test_another_model_in_the_cfg_is_told(server: Server, folder: Path, error_of: ErrorCheck) -> None:
    def named(model: str | None) -> bytes:
        return cfg(metadata={**CFG["metadata"], "model_name": model})

    for one in (None, MODEL, f"org/{MODEL.upper()}", "/home/somebody/model"):
        made = await make(server, config=named(one), params={"strict": "true"})
        assert (made["trained_on"], made["warnings"]) == (one, [])
    refused = await upload(server, config=named("gpt2-small"), params={"strict": "true"})
    message = error_of(refused, 400, "dictionary_mismatch")
    assert "'gpt2-small'" in message
    assert MODEL in message
    assert len(files_in(folder)) == 1
    made = await make(server, config=named("gpt2-small"))
    assert made["trained_on"] == "gpt2-small"
    (warning,) = made["warnings"]
    assert message.startswith(warning.removesuffix("."))
    labels = await server.client.put(f"{ROUTE}/{made['id']}/labels", json={"3": "cats"})
    listed = (await server.client.get(ROUTE)).json()["data"][0]
    assert labels.json()["warnings"] == listed["warnings"] == [warning]
    assert (await server.client.get(f"{ROUTE}/{made['id']}")).json() == listed


@pytest.mark.both_databases
async def test_a_file_goes_with_the_last_dictionary_that_has_it(
    server: Server, folder: Path, error_of: ErrorCheck
) -> None:
    first, second, other = await make(server), await make(server, name="same"), await make(server, weights(1))
    assert first["sha256"] == second["sha256"]
    both = sorted(f"{one['sha256']}.safetensors" for one in (first, other))
    assert files_in(folder) == both
    assert (await server.client.delete(f"{ROUTE}/{first['id']}")).status_code == 204
    assert files_in(folder) == both
    assert (await server.client.get(f"{ROUTE}/{second['id']}/content")).content == weights()
    for one in (second, other):
        assert (await server.client.delete(f"{ROUTE}/{one['id']}")).status_code == 204
    await nothing_is_there(server, folder)
    labels = await server.client.put(f"{ROUTE}/{first['id']}/labels", json={})
    error_of(labels, 404, "dictionary_not_found")


async def test_removals_and_uploads_of_one_file_at_once_leave_it_where_it_is_needed(
    server: Server, folder: Path
) -> None:
    made = [await make(server) for _ in range(4)]
    for _ in range(5):
        removed = [server.client.delete(f"{ROUTE}/{one['id']}") for one in made]
        answers = await asyncio.gather(*removed, *(upload(server) for _ in range(4)))
        made = [answer.json() for answer in answers[len(made) :]]
        assert files_in(folder) == [f"{made[0]['sha256']}.safetensors"]
        content = await server.client.get(f"{ROUTE}/{made[-1]['id']}/content")
        assert content.content == weights()


@pytest.mark.both_databases
async def test_they_outlive_the_server_and_orphans_do_not(
    serve: Serve, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve() as server:
        made = await make(server, labels=json.dumps(LABELS).encode())
    name = f"{made['sha256']}.safetensors"
    for one in (f"{'ab' * 32}.safetensors", f"{'cd' * 32}.removed-{'0' * 16}", "note.txt"):
        (folder / one).write_bytes(b"x")
    (folder / name).rename(folder / f"{made['sha256']}.removed-{'1' * 16}")
    async with serve():
        assert len(files_in(folder)) == 4  # the young ones may belong to another server
    monkeypatch.setattr(dictionary_files, "_ORPHAN_S", -1.0)
    async with serve() as server:
        assert files_in(folder) == sorted([name, "note.txt"])
        assert (await server.client.get(f"{ROUTE}/{made['id']}")).json() == made
        assert (await server.client.get(f"{ROUTE}/{made['id']}/content")).content == weights()
        assert len(await features(server, made["id"])) == len(LABELS)


async def test_hostile_files_are_refused_and_leave_nothing(
    server: Server, folder: Path, error_of: ErrorCheck
) -> None:
    not_a_number = np.full(NUM_FEATURES, np.nan, np.float32)
    wide = np.zeros((9, NUM_FEATURES), np.float32)
    huge = json.dumps(
        {"W_enc": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 2**62]}}
    ).encode()
    cases: list[tuple[int, str, str, dict[str, Any]]] = [
        (415, "unsupported_dictionary", "pickle", {"file_name": "sae.pt"}),
        (415, "unsupported_dictionary", "pickle", {"content": b"\x80\x04\x95abc" + weights()}),
        (415, "unsupported_dictionary", "torch.save", {"content": b"PK\x03\x04" + weights()}),
        (400, "invalid_dictionary", "header", {"content": b"not a file of weights"}),
        (400, "invalid_dictionary", "header", {"content": (2**60).to_bytes(8, "little") + b"{}"}),
        (400, "invalid_dictionary", "broken", {"content": len(huge).to_bytes(8, "little") + huge}),
        (400, "invalid_dictionary", "missing", {"content": weights(threshold=None)}),
        (400, "invalid_dictionary", "do not belong", {"content": weights(b_mag=not_a_number)}),
        (400, "invalid_dictionary", "shape", {"content": weights(W_enc=wide)}),
        (400, "not_finite", "b_enc", {"content": weights(b_enc=not_a_number)}),
        (400, "wrong_dtype", "one dtype", {"content": weights(b_enc=np.zeros(NUM_FEATURES, np.int32))}),
        (400, "bad_request", "needs a file", {"content": b""}),
        (400, "invalid_json", "JSON", {"config": b"{"}),
        (422, "invalid_shape", "object", {"config": b"[]"}),
        (400, "json_too_deep", "deep", {"config": b'{"a":' + b"[" * 999 + b"]" * 999 + b"}"}),
        (400, "not_finite", "NaN", {"config": b'{"d_in": NaN}'}),
        (413, "body_too_large", "cfg", {"config": cfg(note="x" * 300_000)}),
        (400, "invalid_dictionary", "d_sae", {"config": cfg(d_sae=10**30)}),
        (415, "unsupported_dictionary", "batchtopk", {"config": cfg(architecture="batchtopk")}),
        (400, "wrong_width", "8 numbers", {"config": cfg(d_in=9)}),
        (400, "unknown_layer", "4", {"config": cfg(hook_name="blocks.4.hook_resid_post")}),
        (400, "unknown_point", "layers.2.mlp.output", {"config": cfg(hook_name="blocks.2.hook_mlp_out")}),
        (400, "invalid_dictionary", "one point", {"at": "layers.*.output"}),
        (400, "unknown_point", "", {"at": "logits"}),
        (400, "invalid_dictionary", "Only a transcoder", {"output_at": "layers.2.output"}),
        (422, "invalid_shape", "name", {"name": "Not a name"}),
        (422, "invalid_shape", "shared", {"shared": "perhaps"}),
        (400, "bad_request", "fields", {"other": "field"}),
        (400, "invalid_labels", "0 to 15", {"labels": b'{"16": "beyond"}'}),
        (400, "invalid_labels", "3 is there twice", {"labels": b'{"3": "a", "4": ":\\\\", "3": "a"}'}),
        (400, "invalid_labels", "is there twice", {"labels": b'{"3": "a\\":", "\\u0033" : ""}'}),
        (400, "invalid_labels", "cells", {"labels": b"1,one,two"}),
        (400, "invalid_json", "", {"labels": b'{"1": '}),
    ]
    wrong = []
    for status, code, message, given in cases:
        answer = await upload(server, given.pop("content", None), given.pop("config", None), **given)
        if answer.status_code != status or message not in error_of(answer, status, code):
            wrong.append((status, code, message, answer.text))
    assert wrong == []
    await nothing_is_there(server, folder)
    assert (await make(server))["version"] == 1


async def test_an_interrupted_upload_leaves_nothing(serve: Serve, folder: Path, error_of: ErrorCheck) -> None:
    """Weights are on disk while they arrive, and nowhere after a client has stalled or gone."""
    part = b'--x\r\nContent-Disposition: form-data; name="weights"; filename="w"\r\n\r\n'
    seen: list[list[str]] = []

    async def pieces(*, is_lost: bool) -> AsyncIterator[bytes]:
        yield part + weights() + b"0" * 3 * 2**20
        for _ in range(3):  # the receiver has written what came before
            await asyncio.sleep(0.02)
            yield b"0" * 2**20
        seen.append(files_in(folder))
        if is_lost:
            raise ClientDisconnect
        await asyncio.sleep(60)

    headers = {"content-type": "multipart/form-data; boundary=x"}
    async with serve(upload_idle_timeout_s=0.5) as server:
        for is_lost in (False, True):
            sending = server.client.post(ROUTE, content=pieces(is_lost=is_lost), headers=headers)
            if is_lost:
                with pytest.raises(AssertionError):  # no answer
                    await sending
            else:
                error_of(await sending, 408, "upload_timed_out")
            assert len(seen.pop()) == 1
            await nothing_is_there(server, folder)


async def test_limits(serve: Serve, folder: Path, error_of: ErrorCheck) -> None:
    size = len(weights())
    async with serve(max_dictionary_bytes=size - 1) as server:
        assert "max_dictionary_bytes" in error_of(await upload(server), 413, "body_too_large")
        await nothing_is_there(server, folder)
    room = size + len(cfg())
    async with serve(dictionary_store_bytes=room + 200, max_dictionary_bytes=size) as server:
        error_of(await upload(server, labels=b"1," + b"x" * 300), 503, "dictionary_store_full")
        await nothing_is_there(server, folder)
    async with serve(dictionary_store_bytes=room + 2000) as server:
        made = await make(server)
        error_of(await upload(server), 503, "dictionary_store_full")
        labels = {str(feature): "x" * 200 for feature in range(NUM_FEATURES)}
        put = await server.client.put(f"{ROUTE}/{made['id']}/labels", json=labels)
        error_of(put, 503, "dictionary_store_full")
        assert (await server.client.get(f"{ROUTE}/{made['id']}")).json() == made
        await server.client.delete(f"{ROUTE}/{made['id']}")
        await make(server)


@pytest.mark.both_databases
async def test_labels_are_searched_by_words(server: Server, error_of: ErrorCheck) -> None:
    made = await make(server, labels=json.dumps(LABELS).encode())
    assert made["num_labels"] == len(LABELS)
    assert made["bytes"] > made["weights_bytes"] + len(cfg())
    dictionary_id = made["id"]
    whole = [(int(key), text) for key, text in LABELS.items()]
    assert await features(server, dictionary_id) == whole

    def ids(found: list[tuple[int, str | None]]) -> list[int]:
        return [one for one, _ in found]

    for query, expected in {
        "cat": [0, 3, 7], "CATS": [0, 3], "dogs CAT": [0], "dogs": [0, 12], "grossmutter": [7],
        "GROSSMUTTER": [7],
        "%": [11], "_": [11], "100%": [11], "\\": [], "bird": [], "  ": [0, 3, 7, 11, 12], "'": [7],
    }.items():  # fmt: skip
        assert ids(await features(server, dictionary_id, query=query)) == expected, query
    assert await features(server, dictionary_id, id=3) == [(3, "cats")]
    assert await features(server, dictionary_id, id=4) == [(4, None)]
    assert await features(server, dictionary_id, id=15) == [(15, None)]
    assert await features(server, dictionary_id, id=16) == []
    assert await features(server, dictionary_id, id=3, query="dogs") == []
    first = (await server.client.get(f"{ROUTE}/{dictionary_id}/features", params={"limit": 2})).json()
    assert ([one["id"] for one in first["data"]], first["last_id"], first["has_more"]) == ([0, 3], 3, True)
    assert ids(await features(server, dictionary_id, after=3, limit=2)) == [7, 11]
    assert ids(await features(server, dictionary_id, after=11)) == [12]
    many = await server.client.get(f"{ROUTE}/{dictionary_id}/features", params={"query": "x " * 17})
    error_of(many, 400, "invalid_value")


@pytest.mark.both_databases
async def test_a_search_finds_the_labels_in_which_all_words_occur(server: Server) -> None:
    chance = np.random.default_rng(4)
    syllables = ["a", "An", "ß", "SS", "%", "_", "\\", "é", "ana", "nab", "İ", "'"]

    def some(least: int, most: int) -> str:
        return "".join(chance.choice(syllables, int(chance.integers(least, most))))

    labels = {index: " ".join(some(1, 4) for _ in range(4)) for index in range(NUM_FEATURES)}
    made = await make(server, labels=json.dumps(labels).encode())
    num_found = set()
    for _ in range(60):
        words = [some(1, 3) for _ in range(int(chance.integers(1, 5)))]
        expected = [
            (index, label)
            for index, label in labels.items()
            if all(word.casefold() in label.casefold() for word in words)
        ]
        assert await features(server, made["id"], query=" ".join(words)) == expected, words
        num_found.add(len(expected))
    assert len(num_found) > 3


async def test_the_searches_of_a_tenant_leave_the_database_to_others(serve: Serve) -> None:
    num_labels, num_searches = 40_000, 40
    async with serve(max_body_bytes=2**24) as server:
        tenants = Tenants(server)
        headers = [await tenants.headers(name, *USER) for name in ("acme", "rival")]
        shapes = {
            "W_enc": (8, num_labels),
            "W_dec": (num_labels, 8),
            "b_enc": num_labels,
            "threshold": num_labels,
        }
        tensors = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        made = [
            await make(server, weights(**tensors), cfg(d_sae=num_labels), headers=one, labels=labels)
            for one, labels in zip(headers, (many_labels(num_labels), b'{"0": "x"}'), strict=True)
        ]
        paths = [f"{ROUTE}/{one['id']}/features" for one in made]
        words = {"query": "a b c d e f g h i j k l m n o zz"}
        searches = [
            asyncio.create_task(server.client.get(paths[0], params=words, headers=headers[0]))
            for _ in range(num_searches)
        ]
        await asyncio.wait(searches, return_when=asyncio.FIRST_COMPLETED)
        for query in ({"query": "x"}, {}):
            assert (await server.client.get(paths[1], params=query, headers=headers[1])).status_code == 200
        assert sum(one.done() for one in searches) < num_searches // 2
        assert {one.status_code for one in await asyncio.gather(*searches)} == {200}


def many_labels(number: int) -> bytes:
    return json.dumps(dict.fromkeys(range(number), "abcdefghijklmno")).encode()


@pytest.mark.both_databases
async def test_labels_are_replaced_as_a_whole(server: Server, error_of: ErrorCheck) -> None:
    made = await make(server, labels=json.dumps(LABELS).encode())
    route = f"{ROUTE}/{made['id']}/labels"
    changed = (await server.client.put(route, json={"2": "  a \n b ", "4": ""})).json()
    assert (changed["num_labels"], changed["version"], changed["sha256"]) == (1, 1, made["sha256"])
    assert changed["bytes"] < made["bytes"]
    assert server.context.dictionaries.used_bytes == changed["bytes"]
    assert await features(server, made["id"]) == [(2, "a b")]
    as_csv = {"content-type": "text/csv; charset=utf-8"}
    content = '\ufeffID, Label\r\n5,"dogs, and ""cats"""\r\n\r\n0,Größe\r\n'.encode()
    assert (await server.client.put(route, content=content, headers=as_csv)).status_code == 200
    assert await features(server, made["id"]) == [(0, "Größe"), (5, 'dogs, and "cats"')]
    wrong = {
        b"16,beyond": "from 0 to 15", b"-1,x": "from 0 to 15", b"01,x": "from 0 to 15",
        b"1.0,x": "from 0 to 15",
        b"1,a\n1,b": "twice", b"1": "cells", b"1,a,b": "cells", b"1," + b"x" * 501: "500", b"1,\xff": "UTF-8",
        b"1,a\0b": "NUL", b'1,"open': "CSV", "٣,x".encode(): "from 0 to 15", b"1," + b"x" * 200_000: "CSV",
    }  # fmt: skip
    for body, message in wrong.items():
        answer = await server.client.put(route, content=body, headers=as_csv)
        assert message in error_of(answer, 400, "invalid_labels"), body[:20]
    for value in ({"1": 2}, {"1": None}, {"x": "y"}, {"1": ["y"]}, {str(10**30): "y"}):
        error_of(await server.client.put(route, json=value), 400, "invalid_labels")
    error_of(
        await server.client.put(route, content=b"x", headers={"content-type": "text/plain"}),
        400,
        "bad_request",
    )
    error_of(await server.client.put(route, json=[1]), 422, "invalid_shape")
    assert len(await features(server, made["id"])) == 2
    together = [server.client.put(route, json={str(index): "one"}) for index in range(8)]
    assert {answer.status_code for answer in await asyncio.gather(*together)} == {200}
    assert len(await features(server, made["id"])) == 1


async def test_many_labels_do_not_hold_up_others(server: Server) -> None:
    """A file of labels that takes long to read is read beside other requests."""
    made = await make(server)
    body = json.dumps({str(key): "x" * 400 for key in range(60_000)}).encode()
    headers = {"content-type": "application/json"}
    path = f"{ROUTE}/{made['id']}/labels"
    sending = asyncio.create_task(server.client.put(path, content=body, headers=headers))
    num_turns = 0
    while not sending.done():
        await asyncio.sleep(0.005)
        num_turns += 1
    assert (await sending).json()["error"]["code"] == "invalid_labels"
    assert num_turns > 5  # of hundreds; one if the loop waits


async def test_labels_are_replaced_by_whoever_may_remove_the_dictionary(
    tenants: Tenants, error_of: ErrorCheck
) -> None:
    server, client = tenants.server, tenants.server.client
    acme, other = [await tenants.headers(name, Scope.INTERVENTIONS) for name in ("acme", "other")]
    operator = await tenants.headers("operator", *Scope)
    made = await make(server, headers=acme)
    shared = await make(server, headers=operator, shared="true", name="public")
    for headers, one, status, code in (
        (other, made, 404, "dictionary_not_found"),
        (acme, shared, 403, "missing_scope"),
    ):
        put = await client.put(f"{ROUTE}/{one['id']}/labels", json={"1": "mine"}, headers=headers)
        error_of(put, status, code)


async def test_labels_count_among_a_tenants_stored_bytes(tenants: Tenants, error_of: ErrorCheck) -> None:
    acme = await tenants.headers("acme", Scope.INTERVENTIONS)
    operator = await tenants.headers("operator", *Scope)
    made = await make(tenants.server, headers=acme)
    limits = {"stored_bytes": made["bytes"] + 500}
    await tenants.send("PUT", "/v1/admin/tenants/acme/limits", operator, json=limits)
    labels = {str(feature): "x" * 200 for feature in range(NUM_FEATURES)}
    put = await tenants.send("PUT", f"{ROUTE}/{made['id']}/labels", acme, json=labels)
    error_of(put, 403, "stored_bytes_full")


async def test_a_download_outlives_the_removal(server: Server, folder: Path) -> None:
    made = await make(server)
    service = server.context.dictionaries
    _, file = await service.open(made["id"], "")
    assert (await server.client.delete(f"{ROUTE}/{made['id']}")).status_code == 204
    assert files_in(folder) == []
    assert service.used_bytes == made["weights_bytes"]  # the disk has the bytes until then
    assert b"".join([chunk async for chunk in file.chunks()]) == weights()
    assert service.used_bytes == 0


async def test_half_precision_is_kept_as_it_is(server: Server) -> None:
    halves = {name: one.astype(np.float16) for name, one in numbers().items()}
    made = await make(server, safetensors.numpy.save(halves))
    assert made["dtype"] == "float16"
    content = (await server.client.get(f"{ROUTE}/{made['id']}/content")).content
    assert safetensors.numpy.load(content)["W_enc"].dtype == np.float16


class FakeHub:
    """Answers the Hub's client with the files of one repository, and remembers what it was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[httpx2.Request] = []
        self.files: dict[str, bytes | AsyncIterator[bytes]] = {
            "cfg.json": cfg(),
            "sae_weights.safetensors": weights(),
        }
        self.headers = {"x-repo-commit": "c0ffee"}
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "hf_of_the_server")
        transport = httpx2.MockTransport(self.answer)
        make = lambda: httpx2.AsyncClient(transport=transport, follow_redirects=True)  # noqa: E731
        monkeypatch.setattr(huggingface_hub, "get_async_session", make)

    def answer(self, request: httpx2.Request) -> httpx2.Response:
        self.asked.append(request)
        name = request.url.path.rpartition("/")[2]
        if name not in self.files:
            return httpx2.Response(401)
        if request.url.host == "huggingface.co" and name.endswith("safetensors"):
            return httpx2.Response(302, headers={"location": f"https://cdn.example/{name}", **self.headers})
        content = self.files[name]
        return httpx2.Response(
            200, content=streamed(content) if isinstance(content, bytes) else content, headers=self.headers
        )


async def streamed(content: bytes) -> AsyncIterator[bytes]:
    yield content


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    return FakeHub(monkeypatch)


async def from_hub(server: Server, source: Any, headers: Any = None, **fields: Any) -> httpx.Response:
    body = {"name": "sae", "source": source, **fields}
    return await server.client.post(ROUTE, json=body, headers=headers)


async def test_a_dictionary_comes_from_the_hub_with_its_commit(
    server: Server, folder: Path, hub: FakeHub, error_of: ErrorCheck
) -> None:
    answer = await from_hub(server, "hf://owner/saes@v1/layer.2/relu_16")
    assert answer.status_code == 201, answer.text
    made = answer.json()
    assert (made["at"], made["sha256"]) == ("layers.2.output", hashlib.sha256(weights()).hexdigest())
    config = (await server.client.get(f"{ROUTE}/{made['id']}/config")).json()
    assert config == {**CFG, "source": "hf://owner/saes@c0ffee/layer.2/relu_16"}
    assert [(one.url.host, one.url.path) for one in hub.asked] == [
        ("huggingface.co", "/owner/saes/resolve/v1/layer.2/relu_16/cfg.json"),
        ("huggingface.co", "/owner/saes/resolve/c0ffee/layer.2/relu_16/sae_weights.safetensors"),
        ("cdn.example", "/sae_weights.safetensors"),
    ]
    assert [one.headers.get("authorization") for one in hub.asked] == ["Bearer hf_of_the_server"] * 2 + [None]
    assert (await from_hub(server, "hf://owner/saes", at="layers.1.output")).json()["at"] == "layers.1.output"
    assert files_in(folder) == [f"{made['sha256']}.safetensors"]
    hub.files.pop("cfg.json")
    assert "private or gated" in error_of(await from_hub(server, "hf://owner/saes"), 404, "not_found")


async def test_hostile_sources_reach_nothing_and_hostile_files_leave_nothing(
    serve: Serve, folder: Path, hub: FakeHub, tmp_path: Path, error_of: ErrorCheck
) -> None:
    local = tmp_path / "owner" / "saes"
    local.mkdir(parents=True)
    for name, content in hub.files.items():
        assert isinstance(content, bytes)
        (local / name).write_bytes(content)
    size = len(weights())
    async with serve(max_dictionary_bytes=size) as server:
        for source in (
            str(local), f"file://{local}", f"hf://{local}", "hf://owner", "hf://owner/saes/../../secret",
            "hf://owner/..", "hf://../saes", "hf://owner/saes@../x", "hf://owner/saes/a//b", "hf://owner/saes/a?b",
            "hf://owner/saes/a%2e%2e/b", "hf://owner/saes/.git", "hf://datasets/owner/saes", "hf://owner/sa\nes",
            "https://huggingface.co/owner/saes", "hf://owner@host/saes", "saelens://../x", "saelens://release",
        ):  # fmt: skip
            error_of(await from_hub(server, source), 400, "invalid_value")
        for wrong in ("", "x" * 513, 3, None, ["hf://owner/saes"]):
            error_of(await from_hub(server, wrong), 422, "invalid_shape")
        assert hub.asked == []
        good = dict(hub.files)
        for name, content, headers, status, code in (
            ("sae_weights.safetensors", weights() + b"0", {}, 413, "body_too_large"),
            ("sae_weights.safetensors", weights(), {"content-length": str(size + 1)}, 413, "body_too_large"),
            ("sae_weights.safetensors", b"", {}, 400, "invalid_dictionary"),
            ("sae_weights.safetensors", b"\x80\x04\x95abcdefg", {}, 415, "unsupported_dictionary"),
            ("sae_weights.safetensors", weights(threshold=None), {}, 400, "invalid_dictionary"),
            ("cfg.json", cfg(note="x" * 300_000), {}, 413, "body_too_large"),
            ("cfg.json", b"[]", {}, 422, "invalid_shape"),
            ("cfg.json", b'{"a":' + b"[" * 999 + b"]" * 999 + b"}", {}, 400, "json_too_deep"),
            ("cfg.json", gzip.compress(cfg()), {"content-encoding": "gzip"}, 503, "hub_unavailable"),
        ):
            hub.files, hub.headers = {**good, name: content}, headers
            error_of(await from_hub(server, "hf://owner/saes"), status, code)
            await nothing_is_there(server, folder)
        hub.files, hub.headers = good, {"x-repo-commit": "../../x"}
        assert (await from_hub(server, "hf://owner/saes")).status_code == 201
        assert hub.asked[-2].url.path == "/owner/saes/resolve/main/sae_weights.safetensors"


async def test_who_may_have_the_server_download(
    serve: Serve, hub: FakeHub, error_of: ErrorCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve(host="0.0.0.0") as server:
        error_of(await from_hub(server, "hf://owner/saes"), 403, "hub_not_allowed")
    async with serve(hub_downloads=False) as server:
        error_of(await from_hub(server, "hf://owner/saes"), 403, "hub_not_allowed")
    assert hub.asked == []
    for setting in (None, True):
        async with serve(hub_downloads=setting) as server:
            tenants = Tenants(server)
            admin = await tenants.headers(f"operator-{setting is None:d}", Scope.ADMIN, *USER)
            user = await tenants.headers(f"user-{setting is None:d}", *USER)
            assert (await from_hub(server, "hf://owner/saes", admin)).status_code == 201
            assert {one.headers.get("authorization") for one in hub.asked[-3:-1]} == {
                "Bearer hf_of_the_server"
            }
            num_asked = len(hub.asked)
            answer = await from_hub(server, "hf://owner/saes", user)
            if setting is None:
                error_of(answer, 403, "hub_not_allowed")
                assert len(hub.asked) == num_asked
                continue
            assert answer.status_code == 201
            assert not any("authorization" in one.headers for one in hub.asked[num_asked:])
            monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # nor the server's cache
            error_of(await from_hub(server, "hf://owner/saes", user), 503, "hub_unavailable")


async def test_a_client_that_leaves_ends_its_download(server: Server, folder: Path, hub: FakeHub) -> None:
    async def endless() -> AsyncIterator[bytes]:
        yield weights()
        await asyncio.Event().wait()

    hub.files["sae_weights.safetensors"] = endless()
    request = asyncio.create_task(from_hub(server, "hf://owner/saes"))
    await wait_for_async(lambda: len(hub.asked) == 3)
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    await nothing_is_there(server, folder)


async def test_releases_are_looked_up_and_the_cache_serves_without_network(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error_of: ErrorCheck
) -> None:
    table = {
        "small-res": {
            "repo_id": "owner/saes", "conversion_func": None, "config_overrides": {"note": "ours"},
            "saes": [{"id": "blocks.2/x", "path": "layer 2/x", "neuronpedia": "fake/2-res",
                      "norm_scaling_factor": 1.5}],
        },
        "scope": {"repo_id": "owner/scope", "conversion_func": "gemma_2", "saes": [{"id": "a", "path": "a"}]},
    }  # fmt: skip
    for name in ("saelens://small-res/blocks.2/x", "neuronpedia://fake/2-res"):
        assert "has no SAELens" in error_of(await from_hub(server, name), 400, "invalid_value")
    package = tmp_path / "site" / "sae_lens"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('SAELens is not imported')")
    (package / "pretrained_saes.yaml").write_text(json.dumps(table))  # JSON is YAML
    monkeypatch.syspath_prepend(package.parent)
    cache = tmp_path / "hub" / "models--owner--saes"
    snapshot = cache / "snapshots" / "c0ffee" / "layer 2" / "x"
    snapshot.mkdir(parents=True)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("c0ffee")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    error_of(await from_hub(server, "saelens://small-res/blocks.2/x"), 503, "hub_unavailable")
    (snapshot / "cfg.json").write_bytes(cfg())
    (snapshot / "sae_weights.safetensors").write_bytes(weights())
    for name in ("saelens://small-res/blocks.2/x", "neuronpedia://fake/2-res"):
        answer = await from_hub(server, name)
        assert answer.status_code == 201, answer.text
        config = (await server.client.get(f"{ROUTE}/{answer.json()['id']}/config")).json()
        assert config == {
            **CFG,
            "note": "ours",
            "norm_scaling_factor": 1.5,
            "source": "hf://owner/saes@c0ffee/layer 2/x",
        }
    assert "save_model" in error_of(
        await from_hub(server, "saelens://scope/a"), 415, "unsupported_dictionary"
    )
    for name in ("saelens://small-res/blocks.3/x", "saelens://none/x", "neuronpedia://fake/3-res"):
        assert "table of releases has no" in error_of(await from_hub(server, name), 400, "invalid_value")
