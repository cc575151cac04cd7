"""The kinds of trace: beside a run, on fake tensors, kept as an edit, a session, a backward pass."""
