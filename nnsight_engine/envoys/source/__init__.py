"""Points inside a forward: its calls, as named operations; independent of traces and of modules."""
