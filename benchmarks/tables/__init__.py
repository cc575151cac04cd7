"""The tables: one module each, with ``add_options`` and ``plan``; here is what is known before its import.

vLLM reads its environment when it is imported, so the command sets it for the process that imports a table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

from benchmarks.process import ENVIRONMENT, HUGE_PAGES


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """How a table is started.

    Attributes:
        summary: What it measures.
        module: Where its plan is.
        repeats: Repetitions of every case, and of a quick run.
        quick_repeats: The same of a quick run.
        processes: How many processes measure it, each with engines of its own.
        variables: Environment variables of those processes.
    """

    summary: str
    module: str
    repeats: int
    quick_repeats: int = 2
    processes: int = 1
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)


_ENGINE: Final = {**ENVIRONMENT, **HUGE_PAGES}
_OFFLINE: Final = {"HF_HUB_OFFLINE": "1"}
_PEERS: Final = "benchmarks.tables.peers"

TABLES: Final = {
    "serving": Table(
        "serving against plain vLLM with the same engine arguments",
        "benchmarks.tables.serving", 5, processes=3, variables=_ENGINE,
    ),
    "engine-traces": Table(
        "what traced requests cost a step of vLLM's engine",
        "benchmarks.tables.engine_traces", 15, variables=ENVIRONMENT,
    ),
    "scaling": Table(
        "how costs grow with requests, layers, generated tokens and saved bytes",
        "benchmarks.tables.scaling", 5, quick_repeats=1, variables=_ENGINE,
    ),
    "tracing": Table(
        "a trace beside PyTorch hooks, on one thread", "benchmarks.tables.tracing", 60, quick_repeats=10
    ),
    "gpu": Table("traces and plans on CUDA tensors", "benchmarks.tables.gpu", 30),
    "memory": Table(
        "memory of an engine's process, idle and after interventions",
        "benchmarks.tables.memory", 5, quick_repeats=1, variables=ENVIRONMENT,
    ),
    "startup": Table(
        "from the command to the first token, beside vLLM's own server",
        "benchmarks.tables.startup", 5, quick_repeats=1,
    ),
    "http": Table("our server and vLLM's own over HTTP, by turns", "benchmarks.tables.http", 7),
    "fairness": Table(
        "how long one tenant waits while another floods the server",
        "benchmarks.tables.fairness", 5, quick_repeats=1,
    ),
    "remote": Table(
        "a trace on a server, beside the same in its process",
        "benchmarks.tables.remote", 15, quick_repeats=4, variables=ENVIRONMENT,
    ),
    "sandbox": Table(
        "a trace in a sandbox, beside a trusted one",
        "benchmarks.tables.sandbox", 15, quick_repeats=4, variables=ENVIRONMENT,
    ),
    "serialization": Table(
        "sending traces and what they saved, beside cloudpickle and a copy",
        "benchmarks.tables.serialization", 60, quick_repeats=5,
    ),
    "peers-local": Table(
        "traces in one process, beside nnsight, interp-engine and hooks",
        _PEERS, 15, quick_repeats=3, variables=_OFFLINE,
    ),
    "peers-serving": Table(
        "requests in vLLM, beside interp-engine and plain vLLM",
        _PEERS, 15, quick_repeats=3, variables=_OFFLINE,
    ),
}  # fmt: skip
