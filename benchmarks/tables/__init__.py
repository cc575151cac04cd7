"""The tables: one module each, with ``plan`` and perhaps ``add_options``.

vLLM reads its environment when it is imported, so the command sets it for the process that imports a table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

# The position of 4 KiB pages makes one of two equal engines in a process up to 15 % slower than the other;
# with huge pages they differ by less than 1 %. The control shows it.
HUGE_PAGES: Final = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}

ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "KINETO_LOG_LEVEL": "99",
    # Both engines of a comparison live in one process, driven step by step.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # GiB of KV cache; no core is kept for anything else.
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    # Plain engines have the runner of ours.
    "VLLM_USE_V2_MODEL_RUNNER": "1",
}
"""vLLM's variables in a process that drives its engine."""

_ENGINE: Final = {**ENVIRONMENT, **HUGE_PAGES}
_OFFLINE: Final = {"HF_HUB_OFFLINE": "1"}


@dataclasses.dataclass(frozen=True, slots=True)
class TableInfo:
    """How a table is started: repetitions, also of a quick run, processes, and their variables."""

    summary: str
    repeats: int
    quick_repeats: int = 2
    processes: int = 1
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)


TABLES: Final = {
    "serving": TableInfo(
        "serving against plain vLLM with the same engine arguments", 5, processes=3, variables=_ENGINE
    ),
    "engine-traces": TableInfo("cost of traced requests for a step of vLLM's engine", 15, 1, 1, ENVIRONMENT),
    "scaling": TableInfo("growth with requests, layers, generated tokens and saved bytes", 5, 1, 1, _ENGINE),
    "tracing": TableInfo("a trace compared with PyTorch hooks, on one thread", 60, 10),
    "gpu": TableInfo("decoding on a GPU beside plain vLLM; traces and plans there", 5, variables=_ENGINE),
    "memory": TableInfo("memory of an engine's process, idle and after interventions", 5, 1, 1, ENVIRONMENT),
    "startup": TableInfo("time to the first token, compared with vLLM's own server", 5, 1),
    "http": TableInfo("our server and vLLM's own over HTTP, by turns", 7),
    "fairness": TableInfo("waiting time of one tenant while another floods the server", 5, 1),
    "costly": TableInfo("waiting time of one tenant beside costly requests of another", 1, 1),
    "sweeps": TableInfo("a sweep, compared with its cells as single requests", 3, 1, 1, HUGE_PAGES),
    "remote": TableInfo("a trace on a server, compared with the same in its process", 15, 4, 1, _OFFLINE),
    "sandbox": TableInfo("a sandboxed trace, compared with a trusted one", 15, 4, 1, _OFFLINE),
    "serialization": TableInfo("traces and saved values, compared with cloudpickle and a copy", 60, 5),
    "datasets": TableInfo("writing a dataset of activations, compared with dd on the same disk", 5, 1),
    "harvest": TableInfo(
        "a harvest of one layer, compared with the prompts alone and with transformers", 5, 1, 1, _ENGINE
    ),
    "peers-local": TableInfo(
        "traces in one process, beside nnsight, interp-engine and hooks", 15, 3, 1, _OFFLINE
    ),
    "peers-serving": TableInfo("requests in vLLM, beside interp-engine and plain vLLM", 15, 3, 1, _OFFLINE),
}
