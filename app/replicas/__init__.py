"""Several servers behind one address: replicas run by Ray Serve, and a front that routes requests.

A replica is ``nnsight-engine serve`` in a process of its own, watched by an actor of Ray Serve. The front
relays HTTP and WebSockets to it and does not depend on models. Only ``handles``, ``router``, ``replica``,
``application`` and ``command`` use Ray. See ``docs/decisions/0034-replicas.md`` for the reasons.
"""
