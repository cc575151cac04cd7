"""A folder that processes inherit in ``sys.path`` from a script that ``nnsight_engine.compat`` runs."""
