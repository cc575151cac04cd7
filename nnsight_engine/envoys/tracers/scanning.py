from __future__ import annotations

from typing import Any

from nnsight_engine.envoys.tracers.interleaving import InterleavingTracer, run_on_fakes


class _Recorder:
    """Stores each module's first values on its envoy, to be read after the scan."""

    def __init__(self, envoys: dict[str, Any]) -> None:
        self.envoys = envoys

    def add(self, provider: str, iteration: int | None, value: Any) -> None:
        path, _, key = provider.rpartition(".")
        if not iteration:
            self.envoys[path]._fake[key] = value


class ScanningTracer(InterleavingTracer):
    """``with model.scan(input):``; afterwards, envoys return fake values outside a trace."""

    def _run_model(self) -> Any:
        return run_on_fakes(self._interleave)

    def _on_initialized(self) -> None:
        envoys = {str(envoy.path): envoy for envoy in self.model._walk()}
        watched = [f"{path}.{key}" for path in envoys for key in ("input", "output")]
        self.interleaver.watch(_Recorder(envoys), watched)
