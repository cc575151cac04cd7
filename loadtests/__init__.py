"""Load tests of a server over HTTP: see ``__main__``, and ``docs/load-testing.md``.

The command (``__main__``, ``server_setup``) starts a server if none is running, creates keys for its tenants
and defines the run (``run_spec``). A child process, ``run``, sends the requests with locust: it alone imports
locust, which patches sockets and threads of the whole process. Its result is a ``summary``, which is judged
by ``thresholds``.
"""
