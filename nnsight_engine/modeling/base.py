"""``NNsight``: any PyTorch module, ready to be traced."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from nnsight_engine.envoys.envoy import Envoy, EnvoyMap


class NNsight(Envoy):
    """Wraps a module and everything under it.

    Subclasses for a family of models may set ``envoys``, the classes that stand for its modules; users
    override it with ``envoys=``, and opt out with ``envoys=None``.
    """

    envoys: ClassVar[EnvoyMap] = None

    def __init__(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        """Wrap ``module``; further arguments are ``Envoy``'s."""
        kwargs.setdefault("envoys", type(self).envoys)
        super().__init__(module, *args, **kwargs)
