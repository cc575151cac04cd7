"""Many servers behind one address: replicas that Ray Serve runs, and the front that passes requests on.

A replica is ``nnsight-engine serve`` as a process of its own, watched by an actor of Ray Serve's; the front
relays HTTP and WebSockets to it, and knows nothing of models. Only ``handles``, ``router``, ``replica``,
``application`` and ``command`` know Ray. ``docs/decisions/0034-replicas.md`` says why it is so.
"""
