"""A model as it was loaded, whatever the last trace has done to it.

A trace's code can do anything to the model that it is given. What it does by mistake or in passing is undone
here: gradients of parameters, hooks, modes, settings of generation, the state of random numbers. Weights that
were changed cannot be given back; that is noticed, and whoever owns the process loads the model anew.
"""

from __future__ import annotations

import copy
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from nnsight_engine.modeling.language import LanguageModel

_ModuleState = tuple[torch.nn.Module, bool, Any, dict[str, dict[Any, Any]]]


class Pristine:
    """Remembers how a model was, and makes it so again.

    Args:
        model: The model, with its weights.
    """

    def __init__(self, model: LanguageModel) -> None:
        """Take note of everything."""
        self._model = model
        module: Any = model._module  # noqa: SLF001 - an envoy of ours
        self._modules: list[_ModuleState] = [
            (one, one.training, one.__dict__.get("forward"), _hooks(one)) for one in module.modules()
        ]
        self._weights = _weights(module)
        self._needs = [(one, one.requires_grad) for one in module.parameters()]
        self._generation = copy.deepcopy(module.generation_config)
        self._padding_side = model.tokenizer.padding_side

    def begin(self) -> None:
        """Make ready for a trace: its random numbers are its own."""
        renew_globals()

    def restore(self) -> bool:
        """Undo what a trace has done; False if its weights are not what they were."""
        renew_globals()
        model = self._model
        module: Any = model._module  # noqa: SLF001 - an envoy of ours
        for one, training, forward, hooks in self._modules:
            one.training = training
            _put_back(one, forward)
            for name, known in hooks.items():
                found = one.__dict__[name]
                if found.keys() != known.keys():
                    found.clear()
                    found.update(known)
        for parameter, needs_grad in self._needs:
            parameter.grad = None
            parameter.requires_grad_(needs_grad)
        module.generation_config = copy.deepcopy(self._generation)
        model.tokenizer.padding_side = self._padding_side
        model.clear_edits()
        model._forget_looks()  # noqa: SLF001 - an envoy of ours
        return _weights(module) == self._weights


def renew_globals() -> None:
    """Have torch's settings as they are at first, and random numbers that nobody has begun."""
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(mode=True)
    torch.seed()
    random.seed()
    np.random.seed()


def _put_back(module: torch.nn.Module, forward: Any) -> None:
    if module.__dict__.get("forward") is forward:
        return
    if forward is None:
        del module.__dict__["forward"]
    else:
        module.__dict__["forward"] = forward


def _hooks(module: torch.nn.Module) -> dict[str, dict[Any, Any]]:
    return {name: dict(value) for name, value in vars(module).items() if name.endswith("_hooks")}


def _weights(module: torch.nn.Module) -> list[tuple[str, int, int]]:
    """Return what changes with a weight: torch counts the writes to each tensor."""
    return [(name, id(one), one._version) for name, one in module.named_parameters()]  # noqa: SLF001 - torch's
