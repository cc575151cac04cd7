from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

import torch

from nnsight_engine.envoys.architectures.architecture import Architecture, architecture_of
from nnsight_engine.envoys.architectures.points import Points
from nnsight_engine.envoys.envoy import Envoy, EnvoyMap
from nnsight_engine.envoys.module_options import Rename
from nnsight_engine.envoys.values import with_own_output

_STANDARD_NAMES: Final = ("points", "logits", "embed")


class NNsight(Envoy):
    """Wraps a module and all of its submodules.

    Subclasses for a family of models may set ``envoys``, the envoy classes for its modules; users override it
    with ``envoys=``, and opt out with ``envoys=None``.

    Transformers models of known architectures have standard points, whose names are the same on all of them.
    They are also available as attributes: ``layers``, ``norm``, ``embed``, ``logits``,
    ``layers[3].attn.heads`` and so on. If the model has a module of such a name, the name refers to the
    module.

    Attributes:
        points: The standard points: ``points()`` lists them, ``points["layers.3.attn.heads"]`` reads one, and
            an assignment to it writes one.
    """

    envoys: ClassVar[EnvoyMap] = None
    points: Points

    def __init__(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        """Wrap ``module``; further arguments are those of ``Envoy``."""
        architecture = architecture_of(module)
        if architecture is not None:
            _merge(architecture, type(self), kwargs)
        kwargs.setdefault("envoys", type(self).envoys)
        super().__init__(module, *args, **kwargs)
        self.__dict__["_points"] = Points(self, architecture)

    def __getattr__(self, name: str) -> Any:
        """Look a name up on the module, then, if it is a standard one, among the standard points."""
        if name not in _STANDARD_NAMES or "_points" not in self.__dict__:
            return super().__getattr__(name)
        missing: AttributeError
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            missing = error  # raised below: what follows has errors of its own, which this one explains not
        points: Points = self.__dict__["_points"]
        if name == "points":
            return points
        if name in points:
            return with_own_output(points[name], self, name)
        if f"{name}.output" in points:
            return points.group(name)
        raise missing

    def __setattr__(self, name: str, value: Any) -> None:
        """Assign the standard point ``logits``, or set any other attribute as on ``Envoy``."""
        if name == "logits" and self._has_standard_logits():
            self.__dict__["_points"][name] = value
        else:
            super().__setattr__(name, value)

    def _rename(self, rename: Rename | None) -> None:
        architecture = self.__dict__["_points"].architecture
        super()._rename(rename if architecture is None else architecture.rename_with(rename, type(self)))

    def _has_standard_logits(self) -> bool:
        name = "logits"
        is_hidden = name in self.__dict__ or hasattr(type(self), name) or hasattr(self._module, name)
        return not is_hidden and name in self.__dict__.get("_points", ())

    def _before_run(self) -> None:
        super()._before_run()
        self.__dict__["_points"].before_run()

    def _after_run(self) -> None:
        self.__dict__["_points"].after_run()
        super()._after_run()


def _merge(architecture: Architecture, owner: type[NNsight], kwargs: dict[str, Any]) -> None:
    """Merge the architecture's names and classes into the user's, which win; ``envoys=None`` opts out."""
    rename = kwargs.get("rename")
    # Other types are rejected with a message where names are read.
    if rename is None or isinstance(rename, Mapping):
        kwargs["rename"] = architecture.rename_with(rename, owner)
    if kwargs.get("envoys", owner) is not None:
        kwargs["envoys"] = architecture.envoys_with(kwargs.get("envoys", owner.envoys))
