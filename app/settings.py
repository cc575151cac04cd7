"""The server's settings, read once from the environment and passed on.

This is the only module that reads the environment. The setting ``port`` is the variable
``NNSIGHT_ENGINE_PORT``; the command line overrides it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, Literal

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from app.trusted_proxies import check_proxies
from nnsight_engine.core.errors import UnsupportedOptionError
from nnsight_engine.core.sandbox_choice import check_sandbox
from nnsight_engine.core.tap_choice import ALL_TAPS

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB


def _default_result_dir() -> Path:
    return _home("XDG_CACHE_HOME", "~/.cache") / "results"


def _default_data_dir() -> Path:
    return _home("XDG_DATA_HOME", "~/.local/share") / "server"


def _home(variable: str, default: str) -> Path:
    return Path(os.environ.get(variable) or default).expanduser() / "nnsight-engine"


class Settings(BaseSettings):
    """The server's settings; sizes are bytes, times are seconds."""

    model_config = SettingsConfigDict(
        env_prefix="NNSIGHT_ENGINE_", frozen=True, extra="forbid", validate_by_name=True
    )

    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=8000, ge=0, le=65535, description="Port to listen on; 0 picks a free one.")
    max_body_bytes: int = Field(
        default=128 * MIB,
        ge=1024,
        description="Largest request body, counted while it is read. Base64 adds a third to a tensor's size.",
    )
    max_received_bytes: int = Field(
        default=4 * GIB,
        ge=1024,
        description="Most bytes of bodies that the server holds: of requests being sent or answered.",
    )
    max_json_depth: int = Field(
        default=64, ge=4, le=256, description="Deepest nesting of arrays and objects in a request's JSON."
    )
    max_field_objects: int = Field(
        default=10_000,
        ge=1,
        description="Most objects and lists in one field of a request, `messages` or `tools`.",
    )
    max_field_values: int = Field(
        default=500_000, ge=1, description="Most values in one field of a request; a tensor object is one."
    )
    max_prompt_ids: int = Field(
        default=1_000_000, ge=1, description="Most token ids of all prompts of a request together."
    )
    max_grammar_bytes: int = Field(
        default=64 * KIB,
        ge=1,
        description="Longest grammar of a request: of `structured_outputs`, `response_format` or `tools`.",
    )
    max_grammar_repeats: int = Field(
        default=1000, ge=1, description="Highest count of a repetition in a grammar's patterns, `{1,1000}`."
    )
    max_grammar_alternatives: int = Field(
        default=1000, ge=1, description="Most alternatives of a pattern, a choice, an `enum` or an `anyOf`."
    )
    max_grammar_nesting: int = Field(
        default=32, ge=1, description="Deepest nesting of a grammar's groups or of its schema."
    )
    grammar_compile_s: int = Field(
        default=3, ge=1, description="How long a grammar may compute while it is compiled."
    )
    grammar_compile_bytes: int = Field(
        default=512 * MIB, ge=MIB, description="Most memory that compiling a grammar may take."
    )
    max_tensor_bytes: int = Field(default=64 * MIB, ge=1, description="Largest tensor in a request, decoded.")
    max_operations: int = Field(
        default=64, ge=1, description="Most operations that one prompt of a request has."
    )
    max_choices: int = Field(
        default=1024,
        ge=1,
        description="Most choices of one completion or chat, `n` for each of its prompts.",
    )
    inline_tensor_bytes: int = Field(
        default=MIB,
        ge=0,
        description="A choice whose captured tensors exceed this gets a file behind /v1/results/{id}.",
    )
    result_ttl_s: float = Field(
        default=600.0, gt=0, description="How long a file behind /v1/results/{id} is kept."
    )
    result_store_bytes: int = Field(
        default=2 * GIB,
        ge=0,
        description="Most bytes of result files; beyond it the oldest go before they expire.",
    )
    bundled_model_dir: Path | None = Field(
        default=None,
        description="Where the bundled model lies, or is converted to; unset, the user's cache.",
    )
    replica: str = Field(
        default="",
        pattern=r"^[\w-]*$",
        description="What this server is called among replicas behind one address; empty for one alone.",
    )
    result_dir: Path = Field(
        default_factory=_default_result_dir,
        description="Where result files lie; each server process makes a folder of its own in it.",
    )
    max_capture_bytes_per_request: int = Field(
        default=256 * MIB, ge=0, description="Most captured bytes that one request may hold in the engine."
    )
    max_capture_bytes_engine: int = Field(
        default=GIB,
        ge=0,
        description="Most captured bytes that all requests together may hold in the engine.",
    )
    allow_cloudpickle: bool = Field(
        default=False,
        description="Whether traces may come as pickles, which run any code, from keys that may send them.",
    )
    allow_code: bool | None = Field(
        default=None,
        description="Whether clients may send traces, which are code; unset, those whose key says so, or, "
        "without keys, those of this machine.",
    )
    allowed_hosts: str = Field(
        default="",
        description="Names that a server without keys answers to beside localhost and loopback addresses, "
        "separated by commas, such as that of a proxy on its machine.",
    )
    max_trace_request_bytes: int = Field(
        default=GIB, ge=1024, description="Largest trace that a client may send, with its tensors."
    )
    max_trace_requests: int = Field(
        default=256,
        ge=1,
        description="Most requests that one trace may make on vLLM, each invoke's `n` counted.",
    )
    max_trace_bytes: int = Field(
        default=4 * GIB, ge=0, description="Most bytes that one traced request may hold in the engine."
    )
    trace_step_s: float = Field(
        default=10.0, gt=0, description="How long a block may compute within one step of the engine."
    )
    taps: str = Field(
        default=ALL_TAPS,
        description="Where the residual stream is tapped: `all`, `off` or points, `layers.4:20.output`.",
    )
    sandbox: Literal["process", "off"] = Field(
        default="process", description="How code of keys of the tier `sandboxed` runs: `process` or `off`."
    )
    sandbox_bytes: int = Field(
        default=GIB, ge=64 * MIB, description="Most memory that one sandboxed process may take."
    )
    sandbox_step_s: float = Field(
        default=1.0, gt=0, description="How long a sandboxed trace may compute within one step of the engine."
    )
    sandbox_wait_s: float = Field(
        default=0.03,
        gt=0,
        description="How long one step of the engine waits for the sandboxes of one tenant, all together.",
    )
    sandbox_cpu_s: int = Field(
        default=300, ge=1, description="How long a sandboxed process may compute in its life."
    )
    sandbox_needs_namespaces: bool = Field(
        default=False,
        description="Whether the server refuses to start where sandboxes have no namespaces of their own.",
    )
    max_sandboxes: int = Field(default=16, ge=1, description="Most sandboxed traces that run at once.")
    compress_results: bool = Field(
        default=True,
        description="Whether what traces save is compressed for clients that ask for it: those far away do.",
    )
    local_engine: bool = Field(
        default=False,
        description="Whether a second copy of the model runs traces of `LanguageModel`, gradients included.",
    )
    local_engine_device: str = Field(
        default="cpu", description="Where that copy lies: `cpu`, `cuda`, `cuda:1`, …"
    )
    local_engine_dtype: str = Field(
        default="", description="Its type of weights, `float32` or `bfloat16`; empty for the checkpoint's."
    )
    max_queued_traces: int = Field(
        default=64,
        ge=0,
        description="Most traces that wait for the local engine, and most sessions that wait for vLLM.",
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
        default=2, ge=1, description="Most sessions on vLLM that run at once, each in a process."
    )
    data_dir: Path = Field(
        default_factory=_default_data_dir,
        description="Where jobs lie, and the database; what is in it survives the server.",
    )
    database_url: str = Field(
        default="",
        repr=False,  # may contain a password
        description="SQLAlchemy's URL of the database; empty for SQLite in `data_dir`.",
    )
    limits_url: str = Field(
        default="memory://",
        repr=False,  # may contain a password
        description="Where requests of keys are counted, `redis://…` for several servers together.",
    )
    fair_window_s: float = Field(
        default=5.0,
        ge=0,
        description="How long a tenant without requests still has a share of the engine; 0 for no shares.",
    )
    fair_step: float = Field(
        default=1.25,
        ge=1,
        description="How much longer than the shortest a step of the engine may take while a tenant has more "
        "than their share and others are there.",
    )
    audit_days: float = Field(
        default=90.0,
        ge=0,
        description="How many days is kept who ran what, where there are keys; 0 if it is not written down.",
    )
    max_running_jobs: int = Field(default=16, ge=1, description="Most jobs that run at once.")
    max_queued_jobs: int = Field(default=1000, ge=0, description="Most jobs that wait to run.")
    job_ttl_s: float = Field(
        default=86400.0, gt=0, description="How long a job is kept after its end, with its result."
    )
    job_store_bytes: int = Field(
        default=20 * GIB, ge=0, description="Most bytes of all jobs: requests, results, what they printed."
    )
    vector_store_bytes: int = Field(
        default=4 * GIB, ge=0, description="Most bytes of all vectors that the server keeps."
    )
    vector_cache_bytes: int = Field(
        default=256 * MIB, ge=0, description="Most bytes of vectors held in memory, those used last."
    )
    max_training_prompts: int = Field(
        default=512, ge=4, description="Most prompts, of both sides together, that a vector is trained from."
    )
    max_training_bytes: int = Field(
        default=512 * MIB, ge=1, description="Most bytes of the values that a vector is trained from."
    )
    max_queued_trainings: int = Field(
        default=16, ge=0, description="Most trainings of vectors that wait; one runs at a time."
    )
    tenant_share: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="The part of the jobs that wait, and of the bytes of jobs, result files, vectors and "
        "bodies, that one tenant may have.",
    )
    log_format: Literal["json", "text"] | None = Field(
        default=None, description="How the log is written; unset, `text` on a terminal, else `json`."
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        default="WARNING", description="From which level on the server logs; requests are at `INFO`."
    )
    metrics_dir: Path | None = Field(
        default=None,
        validation_alias="PROMETHEUS_MULTIPROC_DIR",
        description="Where several processes behind one port keep their metrics together; unset for one.",
    )
    otlp_endpoint: str = Field(
        default="",
        validation_alias="OTEL_EXPORTER_OTLP_ENDPOINT",
        description="Collector of OpenTelemetry traces; empty for none.",
    )
    otlp_protocol: Literal["http/protobuf", "grpc"] = Field(
        default="http/protobuf",
        validation_alias="OTEL_EXPORTER_OTLP_PROTOCOL",
        description="How the collector is spoken to.",
    )
    trusted_proxies: str = Field(
        default="127.0.0.1",
        description="Addresses and networks of proxies, separated by commas: who a client is, and whether it "
        "speaks TLS, is taken from their headers alone. Empty for none.",
    )
    proxy_header: Literal["x-forwarded-for", "forwarded"] = Field(
        default="x-forwarded-for",
        description="Where they say it: `x-forwarded-for`, with `x-forwarded-proto`, or `forwarded`.",
    )
    playground: bool = Field(default=True, description="Whether the page at /playground is served.")
    upload_idle_timeout_s: float = Field(
        default=30.0, gt=0, description="How long a request's body may pause while it is sent."
    )
    request_timeout_s: float = Field(
        default=3600.0,
        gt=0,
        description="How long a request may take from its head to the last byte of its answer.",
    )
    client_stall_timeout_s: float = Field(
        default=60.0,
        gt=0,
        description="How long a client may take nothing of its answer before it counts as gone.",
    )
    max_engine_restarts: int = Field(
        default=5,
        ge=0,
        description="How often an engine that died is started again within `engine_restart_window_s`.",
    )
    engine_restart_window_s: float = Field(
        default=900.0, gt=0, description="After so long without another the death of an engine is forgotten."
    )
    engine_restart_delay_s: float = Field(
        default=1.0,
        ge=0,
        description="How long after its death an engine is started again; twice as long each further time.",
    )
    engine_stall_timeout_s: float = Field(
        default=300.0,
        ge=0,
        description="How long a step may take before the engine counts as hung and is started again; "
        "what blocks may take of it comes on top. 0: as long as it likes.",
    )
    drain_timeout_s: float = Field(
        default=30.0,
        ge=0,
        description="How long shutdown waits for requests and jobs that are already running.",
    )

    @field_validator("trusted_proxies")
    @classmethod
    def _are_addresses(cls, value: str) -> str:
        check_proxies(value)
        return value

    @field_validator("sandbox", mode="before")
    @classmethod
    def _is_sandbox(cls, value: str) -> str:
        try:
            check_sandbox(value)
        except UnsupportedOptionError as error:
            raise ValueError(str(error)) from None
        return value


def otlp_traces_endpoint(settings: Settings) -> str:
    """Return the endpoint to export spans to, as exporters expect it; empty if there is none."""
    endpoint = settings.otlp_endpoint
    if not endpoint or settings.otlp_protocol == "grpc":
        return endpoint
    return f"{endpoint.rstrip('/')}/v1/traces"


class ClientSettings(BaseSettings):
    """The server that the commands ``chat``, ``lens`` and ``steer`` connect to; see docs/terminal.md."""

    model_config = SettingsConfigDict(env_prefix="NNSIGHT_ENGINE_", frozen=True, extra="ignore")

    url: str | None = Field(default=None, description="Its address; CONFIG.API.HOST without one.")
    key: SecretStr | None = Field(
        default=None, description="What it knows us by; CONFIG.API.KEY without one."
    )
