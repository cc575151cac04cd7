"""Plots of model internals, for notebooks: ``pip install 'nnsight-engine[viz]'``.

The same functions accept tensors that a trace saved, here or on a server, and the results of a server's
response (JSON, or the objects of ``api_schemas``). Each returns a matplotlib figure, or draws into ``ax`` if
it is given, and changes no state of pyplot.
"""

from __future__ import annotations

from nnsight_engine.viz.drawing import Picture
from nnsight_engine.viz.maps import attention_maps, lens_map, patching_map
from nnsight_engine.viz.numbers import VizError
from nnsight_engine.viz.sweeps import sweep_figure
from nnsight_engine.viz.tables import ResultsTable, results_table

__all__ = [
    "Picture",
    "ResultsTable",
    "VizError",
    "attention_maps",
    "lens_map",
    "patching_map",
    "results_table",
    "sweep_figure",
]
