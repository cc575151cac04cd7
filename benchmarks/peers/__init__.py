"""Our speed beside other packages that look into models, each through its public API.

What is compared must do the same: each side hands in the values that it read, and where they differ by more
than rounding there is no ratio. Peers live in a virtual environment of their own, with the very versions of
torch, transformers and vLLM that we have, and run in processes of their own, by turns with ours.
"""
