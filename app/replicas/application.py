"""Ray Serve applications: the replicas of each model as a deployment, and the front if Ray Serve listens."""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import ray
from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette

from app.addresses import is_loopback
from app.commands.keys import has_keys
from app.process_environment import environment_for_replicas
from app.replicas.front import create_front
from app.replicas.handles import ServedReplicas
from app.replicas.options import ModelOptions, ReplicaOptions
from app.replicas.protocol import Replicas
from app.replicas.replica import Replica, ServerOptions
from app.settings import Settings
from nnsight_engine.core.errors import UnsupportedOptionError

logger = logging.getLogger(__name__)

_ROUTER: Final = "app.replicas.handles.PrefixRouter"
_SHUTDOWN_MARGIN_S: Final = 15.0
"""Seconds that a replica's shutdown takes beyond its drain."""
_HEALTH_PERIOD_S: Final = 5.0
_HEALTH_TIMEOUT_S: Final = 30.0
_RETRIES: Final = 2
_FRONT_REQUESTS: Final = 8
"""The most running requests of a front, as a multiple of a replica's."""
_MIN_CPUS: Final = 0.1
_NO_ACCESS_LOG: Final = {"enable_access_log": False}
_NOT_A_NAME: Final = re.compile(r"[^\w.-]+")


def build(args: dict[str, Any]) -> Application:
    """Return the application of a ``serve deploy`` configuration, see ``deploy/ray_serve.yaml``.

    UnsupportedOptionError: there are no keys, so replicas would take Ray Serve's proxies for their own
    machine.
    """
    options, settings = ReplicaOptions.model_validate(args), Settings()
    if not asyncio.run(has_keys(settings)):
        raise no_keys(
            "Ray Serve's proxies accept connections from other machines; create it in the database that the "
            "application's runtime_env names"
        )
    deployments = [replicas_of(index, options, settings) for index in range(len(options.models))]
    return front_of(options, settings, deployments)


def no_keys(why: str) -> UnsupportedOptionError:
    return UnsupportedOptionError(
        "there are no keys: create one with `nnsight-engine keys create --tenant NAME --scopes "
        f"completions,interventions`, because {why}"
    )


def front_of(options: ReplicaOptions, settings: Settings, deployments: Sequence[Application]) -> Application:
    """Return the deployment of the front, over ``deployments``, the replicas of each model."""
    front = serve.deployment(serve.ingress()(ServedFront))
    return front.options(
        name="front",
        max_ongoing_requests=options.max_ongoing_requests * _FRONT_REQUESTS,
        graceful_shutdown_timeout_s=settings.drain_timeout_s + _SHUTDOWN_MARGIN_S,
        ray_actor_options={"num_cpus": 0},
        logging_config=_NO_ACCESS_LOG,
    ).bind(options, settings, *deployments)


def replicas_of(index: int, options: ReplicaOptions, settings: Settings) -> Application:
    """Return the deployment of one model's replicas, which read settings from their own environment.

    UnsupportedOptionError: the cluster has several nodes, and replicas would accept their own node's
    connections only.
    """
    nodes = nodes_of_cluster()
    if len(nodes) > 1 and is_loopback(options.host):
        raise UnsupportedOptionError(
            f"the cluster has {len(nodes)} nodes, and replicas that listen on {options.host} are reachable "
            "from their own node only: set `host: 0.0.0.0`, which requires keys"
        )
    all_resources = [resources_of(its_options, options.models, nodes) for its_options in options.models]
    model, resources = options.models[index], all_resources[index]
    if model.num_devices > 1 and not resources["num_gpus"]:
        logger.warning(
            "the engine of %s needs %d GPUs, and the Ray cluster has none: it is started on CPU cores; if "
            "GPUs are added later, set their number with num_gpus or --replica-gpus",
            model.names[0],
            model.num_devices,
        )
    earlier_models = zip(options.models[:index], all_resources[:index], strict=True)
    stop_s = settings.drain_timeout_s + _SHUTDOWN_MARGIN_S
    server = ServerOptions(
        arguments=[*([] if model.model is None else [model.model]), *model.arguments],
        environment={**environment_for_replicas(), **options.environment, **model.environment},
        host=options.host,
        num_cores=num_cores_of(model, resources),
        first_core=sum(
            its_options.max_replica_count * num_cores_of(its_options, its_resources)
            for its_options, its_resources in earlier_models
        ),
        stop_s=stop_s,
    )
    return (
        serve.deployment(Replica)
        .options(
            name=deployment_name(index, model),
            **scaling_of(model),
            max_ongoing_requests=options.max_ongoing_requests,
            ray_actor_options=resources,
            request_router_config=routing_of(options),
            health_check_period_s=_HEALTH_PERIOD_S,
            health_check_timeout_s=_HEALTH_TIMEOUT_S,
            graceful_shutdown_timeout_s=settings.drain_timeout_s + stop_s + _SHUTDOWN_MARGIN_S,
            max_constructor_retry_count=_RETRIES,
            logging_config=_NO_ACCESS_LOG,
        )
        .bind(server)
    )


def routing_of(options: ReplicaOptions) -> dict[str, Any]:
    return {"request_router_class": _ROUTER, "request_router_kwargs": {"slack": options.slack}}


def scaling_of(model: ModelOptions) -> dict[str, Any]:
    if model.max_replicas is None:
        return {"num_replicas": model.replicas}
    autoscaling = {
        "min_replicas": model.replicas,
        "max_replicas": model.max_replicas,
        "target_ongoing_requests": model.target_ongoing_requests,
        "upscale_delay_s": model.upscale_delay_s,
        "downscale_delay_s": model.downscale_delay_s,
    }
    return {"autoscaling_config": autoscaling}


def nodes_of_cluster() -> list[dict[str, float]]:
    nodes: list[dict[str, Any]] = ray.nodes()
    return [node["Resources"] for node in nodes if node["Alive"]]


def resources_of(
    model: ModelOptions, models: Sequence[ModelOptions], nodes: Sequence[Mapping[str, float]]
) -> dict[str, float]:
    """Return the cores and GPUs that one replica reserves on its node.

    A replica with GPUs reserves one core. The other cores of the smallest node are divided among the most
    replicas on a node, so that all can be scheduled. Ray gives a Ray engine its GPUs, in a placement group of
    its own.
    """
    has_gpus = any(node.get("GPU", 0) > 0 for node in nodes)
    num_gpus = _num_gpus(model, has_gpus=has_gpus)
    if model.num_cpus is not None:
        return {"num_cpus": model.num_cpus, "num_gpus": num_gpus}
    if num_gpus or (has_gpus and not model.num_devices):
        return {"num_cpus": 1.0, "num_gpus": num_gpus}
    sizes = [node["CPU"] for node in nodes if node.get("CPU", 0) >= 1] or [
        1.0
    ]  # heads may be kept for Ray itself
    reserved, sharing = 0.0, 0
    for other in models:
        if other.num_cpus is None and not _num_gpus(other, has_gpus=has_gpus):
            sharing += other.max_replica_count
        else:
            reserved += other.max_replica_count * (1.0 if other.num_cpus is None else other.num_cpus)
    free = min(sizes) - reserved / len(sizes)
    share = free / max(1, math.ceil(sharing / len(sizes)))
    return {"num_cpus": float(int(share)) if share >= 1 else _MIN_CPUS, "num_gpus": num_gpus}


def _num_gpus(model: ModelOptions, *, has_gpus: bool) -> float:
    if model.num_gpus is not None:
        return model.num_gpus
    return float(model.num_devices) if has_gpus else 0.0


def num_cores_of(model: ModelOptions, resources: dict[str, float]) -> int:
    """Return the cores of a replica's engine; 0 if it uses GPUs or has worker processes of its own."""
    return 0 if resources["num_gpus"] or model.num_devices != 1 else max(1, int(resources["num_cpus"]))


def deployment_name(index: int, model: ModelOptions) -> str:
    return f"{index}-{_NOT_A_NAME.sub('-', model.names[0]).strip('-')[-60:]}"


class ServedFront:
    async def __init__(self, options: ReplicaOptions, settings: Settings, *handles: DeploymentHandle) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        self._options = options
        self._settings = settings
        self._replicas: list[Replicas] = [ServedReplicas(handle, options.wait_s) for handle in handles]

    def __serve_build_asgi_app__(self) -> Starlette:
        return create_front(self._settings, self._options, lambda: self._replicas, _ExternalReplicas())


class _ExternalReplicas:
    """Replicas whose lifetime Ray Serve manages."""

    ready = True
    alive = True

    async def start(self) -> None: ...

    async def died(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None: ...
