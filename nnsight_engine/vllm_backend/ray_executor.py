"""vLLM's Ray executor with management of the Ray cluster.

vLLM expects its user to start the cluster, and a cluster that Ray starts by itself on a machine without GPUs
has no room for any worker. So the executor joins the cluster at ``RAY_ADDRESS`` or one that runs on this
machine. If there is none, it starts one that is reachable from this machine only, with a device for each
worker, and stops it with the engine. The executor runs in the process of the engine's core, whichever that
is.
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

from nnsight_engine.vllm_backend.cpu_plugin import RUNNER

_OBJECT_STORE_BYTES: Final = 128 * 1024 * 1024
"""Memory for the objects with which workers are started; computed values do not use Ray's object store."""


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """Make Ray use the loopback address as this machine's, as it does for clusters limited to one node.

    Otherwise it uses the machine's own address, whatever address it is given, and listens on all interfaces.
    """
    before, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


class ClusterExecutor(RayExecutorV2):
    """Runs workers in a Ray cluster, and manages the cluster."""

    _connected = False

    def _init_executor(self) -> None:
        """Join a cluster or start one, then start the workers."""
        assert_ray_available()
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
        # Ray's address file may be left over from a cluster that has stopped, so look for processes.
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
        """Return the workers' runtime environment, with the variable that ``cpu_plugin`` reads."""
        runtime_env: dict[str, Any] = super()._build_runtime_env()
        runtime_env.setdefault("env_vars", {})[RUNNER] = os.environ[RUNNER]
        return runtime_env

    def shutdown(self) -> None:
        """Stop the workers, release their devices and disconnect from the cluster.

        Disconnecting stops the cluster if this executor started it.
        """
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
