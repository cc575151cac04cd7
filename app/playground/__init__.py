"""The page at ``/playground``: its sources are in ``src/``, the built files in ``static/``."""
