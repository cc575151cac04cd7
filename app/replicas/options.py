"""Options of replicas: from the command line, or from ``args`` in Ray Serve's configuration."""

from __future__ import annotations

import argparse
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, model_validator

from app.engine.vllm_options import refuse_with_replicas
from nnsight_engine.core.errors import UnsupportedOptionError
from nnsight_engine.modeling.bundled import BUNDLED_MODEL_NAME

_STRICT: Final = ConfigDict(extra="forbid", frozen=True)


class ModelOptions(BaseModel):
    """One model and its number of replicas."""

    model_config = _STRICT

    model: str | None = Field(
        default=None, description="A Hugging Face name or a folder; by default the bundled model."
    )
    arguments: list[str] = Field(
        default=[],
        description="Further arguments of `nnsight-engine serve`: vLLM's options and its own.",
    )
    replicas: int = Field(default=1, ge=0, description="Number of replicas; with `max_replicas` the minimum.")
    max_replicas: int | None = Field(
        default=None, ge=1, description="Maximum number of replicas, reached under load."
    )
    target_ongoing_requests: float = Field(
        default=32.0, gt=0, description="Running requests per replica above which replicas are added."
    )
    upscale_delay_s: float = Field(
        default=30.0, ge=0, description="Time above the target before a replica is added."
    )
    downscale_delay_s: float = Field(
        default=600.0, ge=0, description="Time below the target before a replica is removed."
    )
    num_cpus: float | None = Field(
        default=None, ge=0, description="Cores of a replica; by default an equal share of the node's."
    )
    num_gpus: float | None = Field(
        default=None, ge=0, description="GPUs of a replica; by default the number that its engine uses."
    )
    environment: dict[str, str] = Field(
        default={}, description="Environment variables of this model's replicas."
    )

    @model_validator(mode="after")
    def _check_range(self) -> ModelOptions:
        """Refuse arguments that replicas cannot have, and numbers of replicas that contradict each other."""
        try:
            options = _engine_options(self.arguments)
            refuse_with_replicas(self.arguments)
        except (argparse.ArgumentError, UnsupportedOptionError) as error:
            raise ValueError(str(error)) from error
        if options.config is not None:
            raise ValueError(
                f"--config {options.config} is not supported with replicas: Ray needs to know the names and "
                "GPUs; give them as arguments"
            )
        if self.max_replicas is None and not self.replicas:
            raise ValueError("replicas may be 0 only if max_replicas is set")
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(
                f"max_replicas must be at least replicas, {self.replicas}, got {self.max_replicas}"
            )
        return self

    @property
    def names(self) -> tuple[str, ...]:
        served_names = _engine_options(self.arguments).served_model_name
        return tuple(served_names) if served_names else (self.model or BUNDLED_MODEL_NAME,)

    @property
    def num_devices(self) -> int:
        """Number of GPUs of one engine, if its own process manages them; 0 if Ray does."""
        options = _engine_options(self.arguments)
        if options.distributed_executor_backend == "ray":
            return 0
        num_devices: int = options.tensor * options.pipeline * options.data * options.prefill
        return num_devices

    @property
    def max_replica_count(self) -> int:
        return self.max_replicas or self.replicas


class ReplicaOptions(BaseModel):
    """Models behind one address."""

    model_config = _STRICT

    models: list[ModelOptions] = Field(min_length=1)
    environment: dict[str, str] = Field(default={}, description="Environment variables of all replicas.")
    host: str = Field(
        default="127.0.0.1",
        description="Address on which replicas listen; `0.0.0.0` if they run on several machines.",
    )
    wait_s: float = Field(
        default=10.0,
        gt=0,
        description="How long a request waits for a replica; starting the first one needs a longer wait.",
    )
    prefix_bytes: int = Field(
        default=256,
        ge=0,
        description="Prompts that share this many first bytes go to one replica; 0 disables the rule.",
    )
    slack: int = Field(
        default=8,
        ge=0,
        description="How many more requests than the least loaded replica that replica may have.",
    )
    max_ongoing_requests: int = Field(
        default=1024, ge=1, description="Maximum number of running requests of a replica."
    )

    @model_validator(mode="after")
    def _check_names(self) -> ReplicaOptions:
        names = [name for model in self.models for name in model.names]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(
                f"each model needs its own names, and several models have {twice}; set `--served-model-name`"
            )
        return self


def _engine_options(arguments: list[str]) -> Any:
    """Return the vLLM arguments needed here; vLLM itself must not be imported for them."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--served-model-name", nargs="+", default=[])
    parser.add_argument("--tensor-parallel-size", "-tp", dest="tensor", type=int, default=1)
    parser.add_argument("--pipeline-parallel-size", "-pp", dest="pipeline", type=int, default=1)
    parser.add_argument("--data-parallel-size", "-dp", dest="data", type=int, default=1)
    parser.add_argument("--prefill-context-parallel-size", "-pcp", dest="prefill", type=int, default=1)
    parser.add_argument("--distributed-executor-backend", default="")
    parser.add_argument("--config")
    return parser.parse_known_args([_dashed(argument) for argument in arguments])[0]


def _dashed(argument: str) -> str:
    name, equals, value = argument.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}" if argument.startswith("--") else argument
