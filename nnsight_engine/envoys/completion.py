"""``%load_ext nnsight_engine`` in IPython or a notebook: completion behind an index, ``model.h[0].<TAB>``.

IPython evaluates what stands before the dot only for classes of which it knows that this runs nobody's code.
Looking up a child of an envoy runs nothing either, and this says so.
"""

from __future__ import annotations

from typing import Any

_OURS = ("nnsight_engine",)


def load_ipython_extension(shell: Any) -> None:
    """Let the shell's completer look into envoys."""
    from IPython.core.guarded_eval import EVALUATION_POLICIES  # noqa: PLC0415 - there if a shell calls this

    completer = shell.Completer
    known: Any = EVALUATION_POLICIES[completer.evaluation]
    completer.use_jedi = False  # it would be asked alone, and does not evaluate
    completer.policy_overrides = {
        **completer.policy_overrides,
        "allowed_getattr_external": {*known.allowed_getattr_external, _OURS},
        "allowed_getitem_external": {*known.allowed_getitem_external, _OURS},
    }
