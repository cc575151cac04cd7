"""Replicas: what an operator says of them, which one a request goes to, their metrics on one page."""

from __future__ import annotations

import collections
import json
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped] # it has no types
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import ServeDeploySchema

from app.replicas.application import build, deployment_name, num_cores_of, resources_of, scaling_of
from app.replicas.options import ModelOptions, ReplicaOptions
from app.replicas.replica import cores_of
from app.replicas.replica_queries import merge_metrics
from app.replicas.routing import RequestRoute, key_of, owner_of, ranked, route_of_body, split_path

DEPLOY = Path(__file__).resolve().parents[4] / "deploy"


def test_the_example_is_a_configuration_of_ray_serves_and_of_ours() -> None:
    schema = ServeDeploySchema.model_validate(yaml.safe_load((DEPLOY / "ray_serve.yaml").read_text()))
    [application] = schema.applications
    options = ReplicaOptions.model_validate(application.args)
    assert len(options.models) == 2
    module, name = application.import_path.split(":")
    assert (module, name) == (build.__module__, build.__name__)


def test_autoscaling_is_said_as_ray_serve_has_it() -> None:
    scaled = scaling_of(ModelOptions(replicas=1, max_replicas=4, target_ongoing_requests=16))
    config = AutoscalingConfig(**scaled["autoscaling_config"])
    assert (config.min_replicas, config.max_replicas, config.target_ongoing_requests) == (1, 4, 16)
    assert scaling_of(ModelOptions(replicas=3)) == {"num_replicas": 3}


@pytest.mark.parametrize(
    ("model", "cluster", "expected"),
    [
        (ModelOptions(replicas=2), {"CPU": 8.0}, (4.0, 0.0, 4)),
        (ModelOptions(replicas=4), {"CPU": 2.0}, (0.1, 0.0, 1)),
        (ModelOptions(replicas=1, max_replicas=4), {"CPU": 8.0}, (2.0, 0.0, 2)),
        (ModelOptions(replicas=2), {"CPU": 8.0, "GPU": 2.0}, (1.0, 1.0, 0)),
        (ModelOptions(replicas=2, num_gpus=0), {"CPU": 8.0, "GPU": 2.0}, (4.0, 0.0, 4)),
        (ModelOptions(arguments=["-tp", "4"]), {"CPU": 8.0, "GPU": 8.0}, (1.0, 4.0, 0)),
        (ModelOptions(arguments=["--tensor_parallel_size=4"]), {"CPU": 8.0, "GPU": 8.0}, (1.0, 4.0, 0)),
        (ModelOptions(arguments=["-tp", "2", "-dp", "2"]), {"CPU": 8.0, "GPU": 8.0}, (1.0, 4.0, 0)),
        (
            ModelOptions(arguments=["-tp=2", "--pipeline-parallel-size", "2"], num_cpus=1),
            {"CPU": 8.0, "GPU": 8.0},
            (1.0, 4.0, 0),
        ),
        (
            ModelOptions(arguments=["-tp", "8", "--distributed-executor-backend", "ray"], num_cpus=1),
            {"CPU": 8.0, "GPU": 8.0},
            (1.0, 0.0, 0),
        ),
    ],
)
def test_cores_and_gpus_are_shared_out(
    model: ModelOptions, cluster: dict[str, float], expected: tuple[float, float, int]
) -> None:
    found = resources_of(model, [model], [cluster])
    assert (found["num_cpus"], found["num_gpus"], num_cores_of(model, found)) == expected


@pytest.mark.parametrize(
    ("models", "nodes", "expected"),
    [
        # Two models on one machine, several machines, a head without cores, cores that somebody has named.
        ([ModelOptions(replicas=2), ModelOptions(replicas=2)], [{"CPU": 8.0}], [2.0, 2.0]),
        ([ModelOptions(replicas=3)], [{"CPU": 8.0}, {"CPU": 16.0}], [4.0]),
        ([ModelOptions(replicas=2)], [{"CPU": 0.0}, {"memory": 1.0}, {"CPU": 4.0}], [2.0]),
        ([ModelOptions(replicas=2, num_cpus=3), ModelOptions(replicas=1)], [{"CPU": 8.0}], [3.0, 2.0]),
    ],
)
def test_all_models_replicas_find_room(
    models: list[ModelOptions], nodes: list[dict[str, float]], expected: list[float]
) -> None:
    assert [resources_of(one, models, nodes)["num_cpus"] for one in models] == expected


def test_replicas_of_one_machine_compute_on_cores_of_their_own() -> None:
    assert [cores_of(rank * 2, 2, [0, 1, 4, 5]) for rank in range(3)] == ["0,1", "4,5", "0,1"]
    assert cores_of(1, 2, [0, 1, 4, 5]) == "1,4"
    assert cores_of(1, 0, [0, 1]) == ""


def test_models_have_names_of_their_own() -> None:
    assert ModelOptions().names == ("smollm2-135m-instruct",)
    assert ModelOptions(model="a/b").names == ("a/b",)
    named = ModelOptions(model="a/b", arguments=["--served-model-name", "x", "y", "--seed", "1"])
    assert named.names == ("x", "y")
    assert ModelOptions(model="a/b", arguments=["--served_model_name=z"]).names == ("z",)
    assert deployment_name(1, ModelOptions(model="/models/Qwen 3")) == "1-models-Qwen-3"
    with pytest.raises(ValidationError, match="each model needs its own names"):
        ReplicaOptions(models=[ModelOptions(model="a"), ModelOptions(model="a")])


@pytest.mark.parametrize(
    "wrong",
    [
        {"replicas": 0},
        {"replicas": 3, "max_replicas": 2},
        {"replica": 1},
        {"arguments": ["-tp", "two"]},
        {"arguments": ["--config", "vllm.yaml"]},
    ],
)
def test_what_makes_no_sense_or_cannot_be_known_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ModelOptions.model_validate(wrong)


IDLE = {"a": 0, "b": 0, "c": 0}
KEYS = [key_of([str(number).encode()]) for number in range(300)]
LONG = "You are a helpful assistant. " * 20


def asked(body: object, key: bytes = b"") -> RequestRoute:
    return route_of_body(json.dumps(body).encode(), key, prefix_bytes=256)


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
    assert route_of_body(json.dumps({"prompt": LONG}).encode(), b"", prefix_bytes=0) == RequestRoute()
    for body in (
        b"",
        b"[1]",
        b"{",
        b'{"model": 3}',
        b'{"model": "\xff"}',
        b"[" * 100_000,
        b'{"model": null}',
    ):
        assert route_of_body(body, b"", prefix_bytes=256) == RequestRoute()


def test_paths_name_models_and_results_their_replica() -> None:
    models = ["Qwen/Qwen3", "Qwen/Qwen3-0.6B", "tiny"]
    assert split_path("/models/Qwen/Qwen3-0.6B/v1/traces", models) == ("Qwen/Qwen3-0.6B", "/v1/traces")
    assert split_path("/models/tiny/v1/jobs", models) == ("tiny", "/v1/jobs")
    assert split_path("/models/other/v1/jobs", models) == ("", "/models/other/v1/jobs")
    assert split_path("/v1/models", models) == ("", "/v1/models")
    assert owner_of("/v1/results/k3x9.AbC-_1") == "k3x9"
    assert owner_of("/v1/results/AbC-_1") == ""
    assert owner_of("/v1/jobs/a.b") == ""


PAGE = """\
# HELP requests_total Requests, {all} of them.
# TYPE requests_total counter
requests_total{route="/v1/jobs/{id}",outcome="a \\"b\\""} 3.0
# HELP up Whether it is.
# TYPE up gauge
up 1.0
"""


def test_each_number_says_whose_it_is_and_families_stay_together() -> None:
    page = merge_metrics({"a": PAGE, "b": PAGE.replace("3.0", "4.0")})
    families = list(text_string_to_metric_families(page))
    assert [one.name for one in families] == ["requests", "up"]
    requests, up = families
    assert [(one.labels["replica"], one.value) for one in requests.samples] == [("a", 3.0), ("b", 4.0)]
    assert requests.samples[0].labels["outcome"] == 'a "b"'
    assert [one.labels for one in up.samples] == [{"replica": "a"}, {"replica": "b"}]
    assert page.count("# TYPE up gauge") == 1
