"""From a ``with`` block to a function that can run later: find its source, compile it, keep its variables."""
