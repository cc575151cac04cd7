"""Our speed compared with other packages that read and change models, each through its public API.

Sides that are compared must do the same: each hands in the values that it read, and where they differ by more
than rounding there is no ratio. Peers have a virtual environment of their own, with our versions of torch,
transformers and vLLM, and run in processes of their own, by turns with ours.
"""
