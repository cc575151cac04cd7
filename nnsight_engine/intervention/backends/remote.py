"""The backend that sends a block to a server."""

from nnsight_engine.remote_backend.backend import RemoteBackend

__all__ = ["RemoteBackend"]
