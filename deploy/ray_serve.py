"""The Ray Serve application, for those who keep their configurations beside their code.

The installed package has it as ``app.replicas.application:build``, which ``ray_serve.yaml`` names.
"""

from __future__ import annotations

from app.replicas.application import build

__all__ = ["build"]
