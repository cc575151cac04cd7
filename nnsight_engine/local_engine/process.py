"""The process of the local engine: ``python -m nnsight_engine.local_engine.process SOCKET OPTIONS``.

The server shares only a socket with it: no memory, no secrets in the environment.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from nnsight_engine.local_engine.block_runner import BlockRunner
from nnsight_engine.local_engine.local_part import call_client_through_server
from nnsight_engine.local_engine.runner import TraceableModel, TraceRunner
from nnsight_engine.local_engine.serving import ServerRequests, serve
from nnsight_engine.local_engine.trace_process import ProcessOptions


def load(options: ProcessOptions, server_requests: ServerRequests) -> BlockRunner:
    """Load the model, and return what runs traces on it; called by ``serve`` once the process listens."""
    if options.num_threads:
        torch.set_num_threads(options.num_threads)
    load_options: dict[str, Any] = {"dtype": options.dtype} if options.dtype else {}
    if options.trust_remote_code:
        load_options["trust_remote_code"] = True
    model = TraceableModel(options.model, revision=options.revision, dispatch=True, **load_options)
    model.to(options.device)
    return TraceRunner(
        model,
        call_client=lambda data: call_client_through_server(server_requests, data),
        max_result_bytes=options.max_result_bytes,
        compresses=options.compresses,
    )


if __name__ == "__main__":
    serve(sys.argv[1:], load)
