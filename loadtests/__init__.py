"""Load tests of a server over HTTP: see ``__main__``, and ``docs/load-testing.md``.

The command (``__main__``, ``preparing``) starts a server where none is, makes its tenants' keys and says what
is asked (``asked``). A child process, ``run``, sends it with locust: it alone imports locust, which
changes sockets and threads of the whole process. What it writes is a ``summary``, which ``thresholds`` judge.
"""
