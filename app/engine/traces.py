"""What runs traces: engines that take a client's message and answer with frames.

Implementations: vLLM's workers (``vllm_traces``), a ``LanguageModel`` in a process of its own
(``local_traces``), and a fake for tests of what is above them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from nnsight_engine.remote_backend.frames import Frame
from nnsight_engine.remote_backend.messages import TraceRequest


class TraceEngine(Protocol):
    """Runs traces.

    Attributes:
        name: ``vllm`` or ``local``, as clients ask for it.
    """

    name: str

    def run_trace(self, request: TraceRequest, job_id: str) -> AsyncGenerator[Frame, None]:
        """Run a trace.

        Yields an ``EVENT`` frame for each ``RUNNING`` and ``LOG`` (JSON of ``JobEvent`` without ``id`` and
        ``job``), ``OUTPUT`` frames if the request streams, then at most one ``OUTPUTS`` and just one
        ``RESULT``. What a block raises is in the result, and an ``EVENT`` of ``ERROR`` before it says so.
        Closed early, it ends what it runs.

        Args:
            request: The trace; its bytes are hostile until an engine has read them.
            job_id: Unguessable, and the trace's own.

        Raises:
            ApiError: The trace cannot be run.
        """
