"""``nnsight_engine.harvest``: one driver for each kind of model, over ``nnsight_engine.datasets``."""
