"""The kinds of trace: during a model run, on fake tensors, stored as an edit, a session, a backward pass."""
