"""Compilation of grammars in processes that can be killed; run by ``python -m``, it forks one per grammar.

Grammars are compiled in C++ and Rust code that cannot be interrupted and may use any amount of memory. The
process that forks has loaded vLLM and the tokenizer, has one thread, and ends when the server
(``app.engine.grammars``) ends. A child sends its process id, reads a ``GrammarJob`` until end of file, and
answers with a ``GrammarVerdict``; a child that sends no verdict has reached a limit.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import socket
import struct
import sys
from types import SimpleNamespace
from typing import Any, Final

import msgspec
from vllm import SamplingParams
from vllm.config.structured_outputs import StructuredOutputsConfig
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import StructuredOutputsParams
from vllm.tokenizers import get_tokenizer
from vllm.v1.structured_output.backend_guidance import GuidanceBackend
from vllm.v1.structured_output.backend_lm_format_enforcer import LMFormatEnforcerBackend
from vllm.v1.structured_output.backend_outlines import OutlinesBackend
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend
from vllm.v1.structured_output.request import get_structured_output_key

from nnsight_engine.core.process import address_space_bytes, end_before_server

READY: Final = b"r"
FORK: Final = b"f"
PID: Final = struct.Struct("<q")
_NICENESS: Final = 10
_BACKENDS: Final[dict[str, Any]] = {
    "guidance": GuidanceBackend,
    "lm-format-enforcer": LMFormatEnforcerBackend,
    "outlines": OutlinesBackend,
    "xgrammar": XgrammarBackend,
}


class GrammarSetup(msgspec.Struct, frozen=True):
    """The model and tokenizer; ``config`` is the operator's ``StructuredOutputsConfig`` of vLLM."""

    tokenizer: str
    tokenizer_mode: str
    revision: str
    trust_remote_code: bool
    vocab_size: int
    model_type: str
    is_diffusion: bool
    config: dict[str, Any]


class GrammarJob(msgspec.Struct, frozen=True):
    """A grammar to compile.

    Attributes:
        params: vLLM's ``StructuredOutputsParams``.
        backend: The backend that the engine uses; empty if the engine has not compiled any grammar yet.
        max_bytes: Limit on the memory that the process may allocate in addition to its memory at the start.
    """

    params: dict[str, Any]
    backend: str
    max_cpu_s: int
    max_bytes: int


class GrammarVerdict(msgspec.Struct, frozen=True):
    """The result of a job.

    Attributes:
        error: Why the grammar is invalid; empty if it is valid.
        was_auto: Whether vLLM chose the backend for this grammar.
        grammar: What vLLM made from the request's ``choice`` list; None to leave the request unchanged.
    """

    error: str = ""
    backend: str = ""
    was_auto: bool = False
    grammar: str | None = None


class _Compiler:
    def __init__(self, setup: GrammarSetup) -> None:
        self._setup = setup
        self._tokenizer = get_tokenizer(
            setup.tokenizer,
            tokenizer_mode=setup.tokenizer_mode,
            revision=setup.revision or None,
            trust_remote_code=setup.trust_remote_code,
        )
        self._config = StructuredOutputsConfig(**setup.config)
        self._model_config: Any = SimpleNamespace(
            is_diffusion=setup.is_diffusion, hf_config=SimpleNamespace(model_type=setup.model_type)
        )

    def verdict(self, job: GrammarJob) -> GrammarVerdict:
        """Check and compile a grammar and compute its first token mask, as the engine will."""
        structured = StructuredOutputsParams(**job.params)
        params = SamplingParams(structured_outputs=structured)
        params._validate_structured_outputs(self._model_config, self._config, self._tokenizer)  # noqa: SLF001 - `verify` needs an engine's config
        backend = job.backend or str(structured._backend)  # noqa: SLF001 - set by the line above
        config: Any = SimpleNamespace(
            structured_outputs_config=self._config, model_config=self._model_config, speculative_config=None
        )
        compiler = _BACKENDS[backend](
            vllm_config=config, tokenizer=self._tokenizer, vocab_size=self._setup.vocab_size
        )
        kind, text = get_structured_output_key(structured)
        grammar = compiler.compile_grammar(kind, text)
        grammar.fill_bitmask(compiler.allocate_token_bitmask(1), 0)
        was_auto = bool(structured._backend_was_auto)  # noqa: SLF001 - as above
        is_made = structured.grammar is not None and "grammar" not in job.params
        return GrammarVerdict(
            backend=backend, was_auto=was_auto, grammar=structured.grammar if is_made else None
        )


def _limit(job: GrammarJob) -> None:
    """Limit this process's CPU time and memory, and have it end with the server."""
    resource.setrlimit(resource.RLIMIT_CPU, (job.max_cpu_s, job.max_cpu_s))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    max_bytes = address_space_bytes() + job.max_bytes
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    os.nice(_NICENESS)
    end_before_server()


def _compile_one(compiler: _Compiler, job_socket: socket.socket) -> None:
    """Answer the one job that comes over a socket; the caller then ends this process."""
    job_socket.sendall(PID.pack(os.getpid()))
    with job_socket.makefile("rb") as received:
        job = msgspec.msgpack.decode(received.read(), type=GrammarJob)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # compilers print their input there
        os.dup2(nowhere, stream)
    _limit(job)
    try:
        verdict = compiler.verdict(job)
    except MemoryError:
        verdict = GrammarVerdict(error="it takes too much memory")
    except VLLMClientError as error:
        verdict = GrammarVerdict(error=str(error))
    except Exception as error:  # noqa: BLE001 - compilers raise any type for an invalid grammar
        verdict = GrammarVerdict(error=str(error) or type(error).__name__)
    job_socket.sendall(msgspec.msgpack.encode(verdict))


def main(arguments: list[str]) -> None:
    """Fork a process for each socket received, until the connection is closed.

    ``arguments``: the file descriptor over which sockets are received, and the ``GrammarSetup`` as JSON.
    """
    orders = socket.socket(fileno=int(arguments[0]))
    compiler = _Compiler(msgspec.json.decode(arguments[1], type=GrammarSetup))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps ended children
    gc.collect()
    gc.freeze()
    orders.sendall(READY)
    while True:
        order, descriptors, _, _ = socket.recv_fds(orders, len(FORK), 1)
        if not order:
            return
        for descriptor in descriptors:
            with socket.socket(fileno=descriptor) as job_socket:
                if os.fork():
                    continue
                orders.close()
                with contextlib.suppress(BaseException):
                    _compile_one(compiler, job_socket)
                os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
