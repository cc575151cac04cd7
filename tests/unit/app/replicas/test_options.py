"""What an operator says of replicas, and what Ray Serve is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped] # it has no types
from pydantic import ValidationError
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import ServeDeploySchema

from app.replicas.application import build, deployment_name, num_cores_of, resources_of, scaling_of
from app.replicas.options import ModelOptions, ReplicaOptions
from app.replicas.replica import cores_of

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
