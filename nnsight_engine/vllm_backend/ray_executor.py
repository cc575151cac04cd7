"""vLLM's Ray executor with a cluster to run in: one that is there, or else one of its own.

vLLM leaves the cluster to its user, and one that Ray starts by itself on a machine without GPUs has no room
for any worker. So the executor joins the cluster at ``RAY_ADDRESS``, or one that runs on this machine, or
starts one that only this machine reaches, with a device for each worker, and ends it with the engine. It is
used in whichever process the engine's core is.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any, Final

from ray._private import ray_constants, services
from vllm.platforms import current_platform
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2
from vllm.v1.executor.ray_utils import assert_ray_available, ray

from nnsight_engine.vllm_backend.ray_plugin import ASKED_FOR, DEVICE

_OBJECT_STORE_BYTES: Final = 128 * 1024 * 1024
"""Room for what workers are started with; what they compute takes other ways."""


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """Let Ray take the loopback address for this machine's, as it does where clusters have one node only.

    It takes the machine's own otherwise, whatever address it is given, and listens to all the world.
    """
    before, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


class ClusterExecutor(RayExecutorV2):
    """Runs workers in a Ray cluster, and takes care of the cluster."""

    _connected = False

    def _init_executor(self) -> None:
        """Join a cluster or start one, then start the workers."""
        assert_ray_available()
        if current_platform.is_cpu() and not current_platform.ray_device_key:
            current_platform.ray_device_key = DEVICE  # here; in the workers, the plugin does it
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if not ray.is_initialized():
            self._connect()
            self._connected = True
        try:
            super()._init_executor()
        except BaseException:
            self.shutdown()
            raise

    def _connect(self) -> None:
        address = os.environ.get("RAY_ADDRESS")
        # The file in which Ray keeps an address may be that of a cluster which has gone: look for processes.
        if address or services.find_gcs_addresses():
            ray.init(address=address or "auto")
            return
        with _on_loopback():
            ray.init(
                address="local",
                num_cpus=self.parallel_config.world_size,
                num_gpus=self.parallel_config.world_size if current_platform.is_cpu() else None,
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
            )

    def _build_runtime_env(self) -> dict[str, Any]:
        """Return the workers' environment."""
        runtime_env: dict[str, Any] = super()._build_runtime_env()
        if current_platform.is_cpu():
            runtime_env.setdefault("env_vars", {})[ASKED_FOR] = "1"
        return runtime_env

    def shutdown(self) -> None:
        """End the workers, give their devices back, and leave the cluster: that ends it if it is our own."""
        already_ended = getattr(self, "shutting_down", False)
        super().shutdown()
        if already_ended or not ray.is_initialized():
            return
        group = self.parallel_config.placement_group
        if group is not None:
            self.parallel_config.placement_group = None
            ray.util.remove_placement_group(group)
        if self._connected:
            ray.shutdown()
