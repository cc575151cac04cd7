"""Tests of models that a server can have, and that have no meaning there; all others run there as well."""

from __future__ import annotations

from typing import Final

WEIGHTS = "looks at weights, which a client does not have"
PASSES = "counts passes of this process's modules"
GRAPH = "the graph of a saved tensor stays on the server"
TERMINAL = "a debugger needs this process's terminal"
CLASSES = "classes of one's own stand for modules, and a server has ours"
LISTS = "a list that is not saved is changed on the server alone"
SEED = "seeds the random numbers of this process"

LOCAL_ONLY: Final = {
    "test_debugging.py::test_breakpoint_stops_in_the_block": TERMINAL,
    "test_editing.py::test_defining_an_edit_runs_nothing": LISTS,
    "test_envoys.py::test_device_and_devices_are_those_of_the_parameters": WEIGHTS,
    "test_errors.py::test_breakpoint_stops_in_the_block_with_its_variables": TERMINAL,
    "test_gradients_examples.py::test_a_backward_pass_can_be_traced_by_itself": GRAPH,
    "test_language_models.py::test_options_of_generation_go_on_to_transformers": SEED,
    "test_methods.py::test_generate_is_just_called_elsewhere": WEIGHTS,
    "test_models.py::test_the_wrapped_model_is_the_one_from_transformers": WEIGHTS,
    "test_own_envoys.py::test_each_invoke_has_heads_of_its_own_rows": CLASSES,
    "test_own_model_class.py::test_a_root_class_gives_blocks_parts_from_elsewhere_in_the_tree": CLASSES,
    "test_own_model_class.py::test_the_chain_that_the_lens_replaces_gives_the_same": CLASSES,
    "test_own_properties.py::test_hidden_serves_a_block_that_returns_a_tensor_as_well": CLASSES,
    "test_performance.py::test_one_trace_with_many_interventions_gives_what_many_traces_give": PASSES,
    "test_scanning.py::test_a_scan_runs_on_fake_tensors_and_leaves_the_weights_alone": WEIGHTS,
    "test_scripts.py::test_gradients_are_read_at_the_top_level_too": GRAPH,
    "test_stopping.py::test_a_block_that_catches_the_stop_has_stopped_all_the_same": PASSES,
    "test_stopping.py::test_a_stop_that_is_caught_last_stops_the_others_too": PASSES,
    "test_stopping.py::test_layers_after_the_stop_do_not_run": PASSES,
}
"""The reason, by file and name."""
