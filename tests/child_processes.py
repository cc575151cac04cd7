"""The helper processes of a server that runs within the process of a test."""

from __future__ import annotations

import psutil


def children_running(module: str) -> list[psutil.Process]:
    """Return the child processes whose command line has a module's name."""
    found = []
    for child in psutil.Process().children():
        try:
            if module in child.cmdline():
                found.append(child)
        except psutil.Error:  # it has just ended
            continue
    return found
