"""The tree that mirrors a model's modules, through which blocks read and write what the model computes."""
