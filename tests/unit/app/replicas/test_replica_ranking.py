"""Which replica a request goes to, and what of it says so."""

from __future__ import annotations

import collections
import json

from app.replicas.replica_ranking import key_of, ranked
from app.replicas.request_route import RequestRoute, of_body, owner_of, split_path

IDLE = {"a": 0, "b": 0, "c": 0}
KEYS = [key_of([str(number).encode()]) for number in range(300)]
LONG = "You are a helpful assistant. " * 20


def asked(body: object, key: bytes = b"") -> RequestRoute:
    return of_body(json.dumps(body).encode(), key, prefix_bytes=256)


def test_a_key_always_leads_to_the_same_replica_and_keys_to_all() -> None:
    first = [ranked(IDLE, key)[0] for key in KEYS]
    assert first == [ranked(dict(reversed(IDLE.items())), key)[0] for key in KEYS]
    assert all(count > 60 for count in collections.Counter(first).values())


def test_a_replica_that_goes_takes_nothing_from_the_others() -> None:
    for key in KEYS:
        order = ranked(IDLE, key)
        left = {name: 0 for name in IDLE if name != order[1]}
        assert ranked(left, key) == [order[0], order[2]]


def test_a_busy_replica_gives_way_to_the_next_of_its_key() -> None:
    order = ranked(IDLE, KEYS[0], slack=4)
    assert ranked({**IDLE, order[0]: 4}, KEYS[0], slack=4) == order
    assert ranked({**IDLE, order[0]: 5}, KEYS[0], slack=4) == [order[1], order[2], order[0]]
    assert ranked(dict.fromkeys(IDLE, 50), KEYS[0], slack=4) == order


def test_without_a_key_the_less_busy_of_two_is_first() -> None:
    for _ in range(50):
        assert ranked({"a": 3, "b": 0}, b"") == ["b", "a"]
    assert {ranked(IDLE, b"")[0] for _ in range(200)} == set(IDLE)


def test_those_that_were_tried_are_left_out_while_there_are_others() -> None:
    assert ranked(IDLE, KEYS[0], tried=["a", "b"]) == ["c"]
    assert sorted(ranked(IDLE, KEYS[0], tried=["a", "b", "c"])) == ["a", "b", "c"]
    assert ranked({}, KEYS[0]) == []


def test_prompts_with_a_common_beginning_have_a_key_in_common() -> None:
    one = asked({"model": "m", "prompt": f"{LONG}one"})
    assert one.key
    assert one == asked({"prompt": f"{LONG}two", "model": "m", "max_tokens": 9})
    assert one.key != asked({"model": "m", "prompt": f"But {LONG}"}).key
    chats = [asked({"messages": [{"role": "user", "content": f"{LONG}{word}"}]}) for word in ("one", "two")]
    assert chats[0].key == chats[1].key != b""


def test_keys_differ_by_tenant_salt_and_interventions() -> None:
    plain = {"prompt": LONG}
    others = [
        asked(plain, b"Bearer nns_a"),
        asked({**plain, "cache_salt": "s"}),
        asked({**plain, "interventions": [{"op": "steer"}]}),
    ]
    assert len({asked(plain).key, *(one.key for one in others)}) == 4


def test_short_prompts_and_what_is_no_request_have_no_key() -> None:
    assert asked({"model": "m", "prompt": "Hi"}) == RequestRoute("m")
    assert of_body(json.dumps({"prompt": LONG}).encode(), b"", prefix_bytes=0) == RequestRoute()
    for body in (
        b"",
        b"[1]",
        b"{",
        b'{"model": 3}',
        b'{"model": "\xff"}',
        b"[" * 100_000,
        b'{"model": null}',
    ):
        assert of_body(body, b"", prefix_bytes=256) == RequestRoute()


def test_paths_name_models_and_results_their_replica() -> None:
    models = ["Qwen/Qwen3", "Qwen/Qwen3-0.6B", "tiny"]
    assert split_path("/models/Qwen/Qwen3-0.6B/v1/traces", models) == ("Qwen/Qwen3-0.6B", "/v1/traces")
    assert split_path("/models/tiny/v1/jobs", models) == ("tiny", "/v1/jobs")
    assert split_path("/models/other/v1/jobs", models) == ("", "/models/other/v1/jobs")
    assert split_path("/v1/models", models) == ("", "/v1/models")
    assert owner_of("/v1/results/k3x9.AbC-_1") == "k3x9"
    assert owner_of("/v1/results/AbC-_1") == ""
    assert owner_of("/v1/jobs/a.b") == ""
