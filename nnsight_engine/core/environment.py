from __future__ import annotations

import os
from collections.abc import Mapping


def set_environment(variables: Mapping[str, str]) -> None:
    """Replace all environment variables by these."""
    os.environ.clear()
    os.environ.update(variables)


__all__ = ["set_environment"]
