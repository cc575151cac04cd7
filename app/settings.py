"""The server's settings, read once from the environment and passed on.

This is the only module that reads the environment. The setting ``port`` is the variable
``NNSIGHT_ENGINE_PORT``; the command line overrides it.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from pathlib import Path
from typing import Any, Final, Literal, Self

from pydantic import Field, PrivateAttr, SecretStr, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from api_schemas.fields import RequestLimits
from app.addresses import check_proxies
from nnsight_engine.core.errors import UnsupportedOptionError
from nnsight_engine.core.operator_choices import ALL_TAPS, check_sandbox

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB


def _default_result_dir() -> Path:
    return _home("XDG_CACHE_HOME", "~/.cache") / "results"


def _default_data_dir() -> Path:
    return _home("XDG_DATA_HOME", "~/.local/share") / "server"


def _home(variable: str, default: str) -> Path:
    return Path(os.environ.get(variable) or default).expanduser() / "nnsight-engine"


@dataclasses.dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds that no operator sets, beside the settings; tests change them by ``Settings.with_bounds``.

    ``max_prompt_ids`` counts all prompts of a request, ``max_choices`` those of all its prompts.
    """

    max_operations: int = 64
    max_tensor_bytes: int = 64 * MIB
    max_choices: int = 1024
    max_field_objects: int = 10_000
    max_field_values: int = 500_000
    max_prompt_ids: int = 1_000_000
    inline_json_bytes: int = 16 * MIB
    max_queued_trainings: int = 16
    max_training_bytes: int = 512 * MIB
    max_queued_sweeps: int = 16
    max_sweep_cells: int = 16384
    max_sweep_bytes: int = 256 * MIB
    vector_cache_bytes: int = 256 * MIB
    preset_store_bytes: int = 64 * MIB
    engine_restart_delay_s: float = 1.0


class Settings(BaseSettings):
    """The server's settings; sizes are bytes, times are seconds."""

    model_config = SettingsConfigDict(
        env_prefix="NNSIGHT_ENGINE_", frozen=True, extra="forbid", validate_by_name=True
    )

    _bounds: Bounds = PrivateAttr(default_factory=Bounds)

    # The address

    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=8000, ge=0, le=65535, description="Port to listen on; 0 picks a free one.")
    allowed_hosts: str = Field(
        default="",
        description="Host names that a server without keys accepts besides localhost and loopback "
        "addresses, separated by commas, such as the name of a proxy on its machine.",
    )
    trusted_proxies: str = Field(
        default="127.0.0.1",
        description="Addresses and networks of proxies, separated by commas. The client's address, and "
        "whether it uses TLS, are taken from the headers of these proxies only. Empty for "
        "none.",
    )
    proxy_header: Literal["x-forwarded-for", "forwarded"] = Field(
        default="x-forwarded-for",
        description="The header that these proxies set: `x-forwarded-for`, with `x-forwarded-proto`, or "
        "`forwarded`.",
    )
    replica: str = Field(
        default="",
        pattern=r"^[\w-]*$",
        description="Name of this server among the replicas behind one address; empty if it is the only "
        "server.",
    )
    playground: bool = Field(default=True, description="Whether the page /playground is served.")

    sse_keep_alive_s: float = Field(
        default=0,
        ge=0,
        description="Seconds after which a stream of events in which nothing happens gets a comment, so that "
        "no proxy closes it; 0 for none.",
    )

    # Request bodies

    max_body_bytes: int = Field(
        default=128 * MIB,
        ge=1024,
        description="Largest request body, counted while it is read. Base64 increases a tensor's size by "
        "a third.",
    )
    max_received_bytes: int = Field(
        default=4 * GIB,
        ge=1024,
        description="Most bytes of bodies that the server holds in memory, of all requests being received "
        "or answered.",
    )

    # Results

    inline_tensor_bytes: int = Field(
        default=MIB,
        ge=0,
        description="If the captured tensors of a choice exceed this, they are returned as a file at "
        "/v1/results/{id}. Their other numbers are, beyond 16 MiB of JSON, or this if it is more.",
    )
    result_ttl_s: float = Field(
        default=600.0, gt=0, description="How long a file at /v1/results/{id} is stored."
    )
    result_store_bytes: int = Field(
        default=2 * GIB,
        ge=0,
        description="Most bytes of result files; beyond it the oldest are evicted before they expire.",
    )
    result_dir: Path = Field(
        default_factory=_default_result_dir,
        description="Folder of result files; each server process creates its own folder in it.",
    )

    # The engine

    bundled_model_dir: Path | None = Field(
        default=None,
        description="Folder of the converted bundled model; if not set, the user's cache folder.",
    )
    taps: str = Field(
        default=ALL_TAPS,
        description="Points of the residual stream with taps in the compiled model: `all`, `off`, or "
        "points such as `layers.4:20.output`.",
    )
    intervention_graphs: Literal["decode", "off"] = Field(
        default="decode",
        description="Steps with interventions for which full CUDA graphs are captured, where vLLM has such "
        "graphs: `decode`, or `off` for none.",
    )
    points: Literal["any", "strict"] = Field(
        default="any",
        description="Models that have points: `any` decoder, whose residual stream is found by its "
        "structure if there is no table for it; or `strict`: those with a table.",
    )
    max_capture_bytes_per_request: int = Field(
        default=256 * MIB, ge=0, description="Most captured bytes that one request may hold in the engine."
    )
    max_capture_bytes_engine: int = Field(
        default=GIB,
        ge=0,
        description="Most captured bytes that all requests together may hold in the engine.",
    )
    max_work: float = Field(
        default=64.0,
        gt=0,
        description="Most work of one request's operations at one position, as a multiple of the model's own "
        "computation for a position.",
    )
    loaded_dictionary_bytes: int = Field(
        default=2 * GIB,
        ge=0,
        description="Most bytes of the weights of dictionaries that an engine holds on its device at a time. "
        "They are outside of the memory that vLLM plans (`gpu_memory_utilization`).",
    )
    max_engine_restarts: int = Field(
        default=5,
        ge=0,
        description="Most restarts of an engine that has died, within `engine_restart_window_s`.",
    )
    engine_restart_window_s: float = Field(
        default=900.0, gt=0, description="Time after which the death of an engine is no longer counted."
    )
    engine_stall_timeout_s: float = Field(
        default=300.0,
        ge=0,
        description="Longest step before the engine counts as hung and is restarted; the time limits of "
        "blocks are added to it. 0 for no limit.",
    )

    # Traces

    allow_code: bool | None = Field(
        default=None,
        description="Whether clients may send traces, which are code. If not set, clients whose key "
        "allows it may or, without keys, clients on this machine.",
    )
    allow_cloudpickle: bool = Field(
        default=False,
        description="Whether traces may be sent as pickles, which run arbitrary code, with keys that "
        "permit it.",
    )
    max_trace_request_bytes: int = Field(
        default=GIB, ge=1024, description="Largest trace that a client may send, with its tensors."
    )
    max_trace_bytes: int = Field(
        default=4 * GIB, ge=0, description="Most bytes that one traced request may hold in the engine."
    )
    trace_step_s: float = Field(
        default=10.0, gt=0, description="How long a block may compute within one step of the engine."
    )
    max_queued_traces: int = Field(
        default=64,
        ge=0,
        description="Most traces queued for the local engine, and most sessions queued for vLLM.",
    )
    trace_time_limit_s: float = Field(
        default=600.0, gt=0, description="How long a trace on the local engine, or a session, may run."
    )
    local_block_timeout_s: float = Field(
        default=60.0,
        gt=0,
        description="How long a block waits for its client to run a part of it, `tracer.local()`.",
    )
    session_processes: int = Field(
        default=2, ge=1, description="Most sessions on vLLM that run at once, each in its own process."
    )
    local_engine: bool = Field(
        default=False,
        description="Whether a second copy of the model runs traces of `LanguageModel`, gradients included.",
    )
    local_engine_device: str = Field(
        default="cpu", description="Device of that copy: `cpu`, `cuda`, `cuda:1`, …"
    )
    local_engine_dtype: str = Field(
        default="",
        description="Dtype of that copy's weights, `float32` or `bfloat16`; empty for the checkpoint's.",
    )

    # The sandbox

    sandbox: Literal["process", "off"] = Field(
        default="process", description="How code of keys of the tier `sandboxed` runs: `process` or `off`."
    )
    max_sandboxes: int = Field(default=16, ge=1, description="Most sandboxed traces that run at once.")
    sandbox_bytes: int = Field(default=GIB, ge=64 * MIB, description="Most memory of one sandbox process.")
    sandbox_step_s: float = Field(
        default=0.75,
        gt=0,
        description="How long a sandboxed trace may compute within one step of the engine.",
    )
    sandbox_needs_namespaces: bool = Field(
        default=False,
        description="Whether the server refuses to start if sandboxes cannot have their own namespaces.",
    )

    # Stored data: jobs, vectors, detectors, dictionaries, presets, the audit log

    data_dir: Path = Field(
        default_factory=_default_data_dir,
        description="Folder of jobs and the database; its content persists across restarts.",
    )
    database_url: str = Field(
        default="",
        repr=False,  # may contain a password
        description="SQLAlchemy URL of the database; empty for SQLite in `data_dir`.",
    )
    audit_days: float = Field(
        default=90.0,
        ge=0,
        description="How many days audit records are retained on a server with keys; 0 disables the audit "
        "log.",
    )
    max_running_jobs: int = Field(default=16, ge=1, description="Most jobs that run at once.")
    max_queued_jobs: int = Field(default=1000, ge=0, description="Most queued jobs.")
    job_ttl_s: float = Field(
        default=86400.0, gt=0, description="How long a job and its result are stored after its end."
    )
    job_store_bytes: int = Field(
        default=20 * GIB, ge=0, description="Most bytes of all jobs: requests, results, printed text."
    )
    vector_store_bytes: int = Field(
        default=4 * GIB, ge=0, description="Most bytes of all stored vectors and detectors."
    )
    dictionary_dir: Path | None = Field(
        default=None,
        description="Folder of the weights of dictionaries, shared by all servers of one database; if not "
        "set, a folder in `data_dir`.",
    )
    dictionary_store_bytes: int = Field(
        default=20 * GIB, ge=0, description="Most bytes of all stored dictionaries, their labels included."
    )
    max_dictionary_bytes: int = Field(
        default=8 * GIB, ge=1024, description="Largest file of a dictionary's weights."
    )
    hub_downloads: bool | None = Field(
        default=None,
        description="Whether the server downloads dictionaries from the Hugging Face Hub for its clients. If "
        "not set, for keys with the scope `admin` or, without keys, for clients on this machine. Only for "
        "these it uses its own token of the Hub.",
    )

    examples: bool = Field(
        default=True,
        description="Whether a server of the bundled model stores its examples: vectors, a detector and a "
        "dictionary.",
    )

    # Shares of tenants

    tenant_share: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="The part of each limited resource that one tenant may use: queued jobs, and bytes of "
        "jobs, result files, vectors, detectors, dictionaries, presets and bodies.",
    )
    limits_url: str = Field(
        default="memory://",
        repr=False,  # may contain a password
        description="Storage of the request counts of keys; `redis://…` shares them between servers.",
    )
    fair_window_s: float = Field(
        default=5.0,
        ge=0,
        description="How long a tenant without requests still has a share of the engine; 0 for no shares.",
    )

    # Time limits of requests

    upload_idle_timeout_s: float = Field(
        default=30.0, gt=0, description="Longest pause while a request's body is sent."
    )
    request_timeout_s: float = Field(
        default=3600.0,
        gt=0,
        description="Longest duration of a request, from its head to the last byte of its answer.",
    )
    client_stall_timeout_s: float = Field(
        default=60.0,
        gt=0,
        description="How long a client may receive nothing of its answer before it counts as disconnected.",
    )
    drain_timeout_s: float = Field(
        default=30.0,
        ge=0,
        description="How long shutdown waits for requests and jobs that are already running.",
    )

    # Logs, metrics, OpenTelemetry

    log_format: Literal["json", "text"] = Field(
        default="text", description="Format of the log: `text` for people, or `json`."
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        default="WARNING", description="Lowest level that the server logs; requests are logged at `INFO`."
    )
    metrics_dir: Path | None = Field(
        default=None,
        validation_alias="PROMETHEUS_MULTIPROC_DIR",
        description="Folder in which several processes behind one port share their metrics; not set for "
        "one process.",
    )
    otlp_endpoint: str = Field(
        default="",
        validation_alias="OTEL_EXPORTER_OTLP_ENDPOINT",
        description="Collector of OpenTelemetry spans; empty for none.",
    )
    otlp_protocol: Literal["http/protobuf", "grpc"] = Field(
        default="http/protobuf",
        validation_alias="OTEL_EXPORTER_OTLP_PROTOCOL",
        description="Protocol of the collector.",
    )

    @field_validator("trusted_proxies")
    @classmethod
    def _check_proxies(cls, value: str) -> str:
        check_proxies(value)
        return value

    @field_validator("sandbox", mode="before")
    @classmethod
    def _check_sandbox(cls, value: str) -> str:
        try:
            check_sandbox(value)
        except UnsupportedOptionError as error:
            raise ValueError(str(error)) from None
        return value

    @property
    def bounds(self) -> Bounds:
        return self._bounds

    def with_bounds(self, **changed: Any) -> Self:
        """Return these settings with other bounds."""
        copy = self.model_copy()
        copy._bounds = dataclasses.replace(self._bounds, **changed)  # noqa: SLF001 - of this class
        return copy

    @property
    def inline_json_bytes(self) -> int:
        """The bytes of JSON beyond which a choice's results other than tensors are returned as a file."""
        return max(self.bounds.inline_json_bytes, self.inline_tensor_bytes)

    @property
    def request_limits(self) -> RequestLimits:
        """The limits on one request's interventions."""
        return RequestLimits(
            max_operations=self.bounds.max_operations, max_tensor_bytes=self.bounds.max_tensor_bytes
        )


def otlp_traces_endpoint(settings: Settings) -> str:
    """Return the endpoint to export spans to, as exporters expect it; empty if there is none."""
    endpoint = settings.otlp_endpoint
    if not endpoint or settings.otlp_protocol == "grpc":
        return endpoint
    return f"{endpoint.rstrip('/')}/v1/traces"


_REMOVED: Final = frozenset(
    {
        "COMPRESS_RESULTS", "ENGINE_RESTART_DELAY_S", "FAIR_STEP", "GRAMMAR_COMPILE_BYTES",
        "GRAMMAR_COMPILE_S", "INLINE_JSON_BYTES", "MAX_CHOICES", "MAX_FIELD_OBJECTS",
        "MAX_FIELD_VALUES", "MAX_GRAMMAR_ALTERNATIVES", "MAX_GRAMMAR_BYTES", "MAX_GRAMMAR_NESTING",
        "MAX_GRAMMAR_REPEATS", "MAX_JSON_DEPTH", "MAX_OPERATIONS", "MAX_PROMPT_IDS",
        "MAX_QUEUED_TRAININGS", "MAX_STEP_WORK", "MAX_TENSOR_BYTES", "MAX_TRACE_REQUESTS",
        "MAX_TRAINING_BYTES", "MAX_TRAINING_PROMPTS", "PRESET_STORE_BYTES", "SANDBOX_CPU_S",
        "SANDBOX_WAIT_S", "VECTOR_CACHE_BYTES",
    }
)  # fmt: skip
"""Settings that became constants (docs/decisions/0064)."""


def removed_variable() -> str | None:
    """Return an environment variable of a setting that no longer exists; None if there is none."""
    prefix = Settings.model_config["env_prefix"]
    return min((name for one in _REMOVED if (name := f"{prefix}{one}") in os.environ), default=None)


def misspelt_variable() -> tuple[str, str] | None:
    """Return an environment variable that is no setting, and the similar name of one; None if all are.

    Others that begin like settings are left alone: they belong to scripts, or to Kubernetes.
    """
    prefix = Settings.model_config["env_prefix"]
    known = [name.upper() for name in (*Settings.model_fields, *ClientSettings.model_fields)]
    for name in sorted(os.environ):
        unprefixed = name.removeprefix(prefix)
        if unprefixed != name and unprefixed not in known:
            for similar in difflib.get_close_matches(unprefixed, known, n=1, cutoff=0.75):
                return name, f"{prefix}{similar}"
    return None


class ClientSettings(BaseSettings):
    """The server that the commands ``chat``, ``lens`` and ``steer`` connect to; see docs/terminal.md."""

    model_config = SettingsConfigDict(env_prefix="NNSIGHT_ENGINE_", frozen=True, extra="ignore")

    url: str | None = Field(default=None, description="Address of the server; by default CONFIG.API.HOST.")
    key: SecretStr | None = Field(
        default=None, description="API key for the server; by default CONFIG.API.KEY."
    )
