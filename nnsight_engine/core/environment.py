"""The variables of this process's environment, all of them at once."""

from __future__ import annotations

import os
from collections.abc import Mapping


def set_environment(variables: Mapping[str, str]) -> None:
    """Have these variables and no others."""
    os.environ.clear()
    os.environ.update(variables)


__all__ = ["set_environment"]
