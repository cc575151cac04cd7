"""Points inside a forward: instrumentation of its calls, one by one, and their printed listing.

A module's hooks show its input and output. The values in between are reached through a rewritten
forward in which each call expression becomes a named operation. This package is independent of traces and
modules: the caller passes a function, and a callback that is called for each operation.
"""
