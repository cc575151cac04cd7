"""``%load_ext nnsight_engine``: completion after an index, for which IPython must trust our classes."""

from __future__ import annotations

from typing import Any

_OURS = ("nnsight_engine",)


def load_ipython_extension(shell: Any) -> None:
    """Allow the shell's completer to evaluate attributes and items of envoys."""
    from IPython.core.guarded_eval import EVALUATION_POLICIES  # noqa: PLC0415 - there if a shell calls this

    completer = shell.Completer
    known: Any = EVALUATION_POLICIES[completer.evaluation]
    completer.use_jedi = False  # Jedi would be the only completer used, and it does not evaluate
    completer.policy_overrides = {
        **completer.policy_overrides,
        "allowed_getattr_external": {*known.allowed_getattr_external, _OURS},
        "allowed_getitem_external": {*known.allowed_getitem_external, _OURS},
    }
