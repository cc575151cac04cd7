"""Points inside a forward: its calls, instrumented one by one, and how they are printed.

A module's hooks show what goes in and out of it. What happens between is reached by a rewritten
forward in which each call expression becomes a named operation. Nothing here knows of traces or
modules: the caller gives a function and says what is to happen at each operation.
"""
