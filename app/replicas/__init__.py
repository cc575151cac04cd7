"""Several servers behind one address: replicas run by Ray Serve, and a front that routes requests.

Only ``handles``, ``replica``, ``application`` and ``command`` use Ray. Reasons:
``docs/decisions/0034-replicas.md``.
"""
