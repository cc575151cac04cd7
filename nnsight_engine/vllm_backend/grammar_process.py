"""Grammars compiled in processes that can be ended: ``python -m`` this one, which forks one for each.

Compiling runs in C++ and Rust that cannot be interrupted and takes what memory it likes, so each grammar has
a process with limits of both. Forking one that has vLLM and the tokenizer takes milliseconds; this process
itself compiles nothing and has one thread. It gets a socket for each grammar, and ends when the server does.
The child says its process id, reads a ``GrammarJob`` to the end, and answers with a ``GrammarVerdict``; one
that says nothing has reached a limit. The server's side is ``app.engine.grammars``.
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

from nnsight_engine.core.process_memory import address_space_bytes, end_before_server

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
    """What grammars are compiled for.

    Attributes:
        tokenizer: A name or a folder.
        tokenizer_mode: vLLM's.
        revision: Of the tokenizer; empty for the default.
        trust_remote_code: Whether the tokenizer may be code of its own.
        vocab_size: Of the model.
        model_type: Of the model, as its configuration has it.
        is_diffusion: Whether it makes its tokens all at once.
        config: vLLM's ``StructuredOutputsConfig``: what the operator has chosen.
    """

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
        backend: What the engine compiles with; empty if nothing was compiled there yet.
        max_cpu_s: Of the process.
        max_bytes: That the process may take beside what it has.
    """

    params: dict[str, Any]
    backend: str
    max_cpu_s: int
    max_bytes: int


class GrammarVerdict(msgspec.Struct, frozen=True):
    """What came of it.

    Attributes:
        error: Why it is none; empty if it is one.
        backend: What is to compile it.
        was_auto: Whether vLLM chose that for it.
        grammar: What vLLM has made of its alternatives; None to leave it as it is.
    """

    error: str = ""
    backend: str = ""
    was_auto: bool = False
    grammar: str | None = None


class _Compiler:
    """vLLM's own checks and compilers, without an engine around them."""

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
        """Check and compile a grammar, and find what it allows first, as the engine will."""
        structured = StructuredOutputsParams(**job.params)
        params = SamplingParams(structured_outputs=structured)
        params._validate_structured_outputs(self._model_config, self._config, self._tokenizer)  # noqa: SLF001 - `verify` wants an engine's configuration
        backend = job.backend or str(structured._backend)  # noqa: SLF001 - what the line above has set
        config: Any = SimpleNamespace(
            structured_outputs_config=self._config, model_config=self._model_config, speculative_config=None
        )
        compiler = _BACKENDS[backend](
            vllm_config=config, tokenizer=self._tokenizer, vocab_size=self._setup.vocab_size
        )
        kind, text = get_structured_output_key(structured)
        grammar = compiler.compile_grammar(kind, text)
        grammar.fill_bitmask(compiler.allocate_token_bitmask(1), 0)
        was_auto = bool(structured._backend_was_auto)  # noqa: SLF001 - likewise
        is_made = structured.grammar is not None and "grammar" not in job.params
        return GrammarVerdict(
            backend=backend, was_auto=was_auto, grammar=structured.grammar if is_made else None
        )


def _limit(job: GrammarJob) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (job.max_cpu_s, job.max_cpu_s))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most = address_space_bytes() + job.max_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    os.nice(_NICENESS)
    end_before_server()


def _compile_one(compiler: _Compiler, asked: socket.socket) -> None:
    """Answer one job; in a process of its own."""
    asked.sendall(PID.pack(os.getpid()))
    with asked.makefile("rb") as received:
        job = msgspec.msgpack.decode(received.read(), type=GrammarJob)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # compilers write there what they are given
        os.dup2(nowhere, stream)
    _limit(job)
    try:
        verdict = compiler.verdict(job)
    except MemoryError:
        verdict = GrammarVerdict(error="it takes too much memory")
    except VLLMClientError as error:
        verdict = GrammarVerdict(error=str(error))
    except Exception as error:  # noqa: BLE001 - compilers raise what they like for a grammar that is none
        verdict = GrammarVerdict(error=str(error) or type(error).__name__)
    asked.sendall(msgspec.msgpack.encode(verdict))


def main(arguments: list[str]) -> None:
    """Fork a process for each socket that comes, until no more can.

    Args:
        arguments: The descriptor of the socket that they come over, and the ``GrammarSetup`` as JSON.
    """
    orders = socket.socket(fileno=int(arguments[0]))
    compiler = _Compiler(msgspec.json.decode(arguments[1], type=GrammarSetup))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system takes up those that have ended
    gc.collect()
    gc.freeze()
    orders.sendall(READY)
    while True:
        word, descriptors, _, _ = socket.recv_fds(orders, len(FORK), 1)
        if not word:
            return
        for descriptor in descriptors:
            with socket.socket(fileno=descriptor) as asked:
                if os.fork():
                    continue
                orders.close()
                with contextlib.suppress(BaseException):
                    _compile_one(compiler, asked)
                os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
