"""vLLM's Ray executor, which joins the cluster at ``RAY_ADDRESS`` or on this machine, or starts one.

Its own cluster is reachable from this machine only, has devices for the workers, also without GPUs, and is
stopped with the engine.
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
    """Make Ray use the loopback address; otherwise it uses the machine's own and listens everywhere."""
    before, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


class ClusterExecutor(RayExecutorV2):
    _connected = False

    def _init_executor(self) -> None:
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
        """Join a running cluster, or start one on this machine."""
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
        runtime_env: dict[str, Any] = super()._build_runtime_env()
        runtime_env.setdefault("env_vars", {})[RUNNER] = os.environ[RUNNER]
        return runtime_env

    def shutdown(self) -> None:
        """Shut down, once; leave a cluster that was joined, and end one that was started."""
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
