"""The tables of both engines: where each standard point lies in the modules of each family of models.

A point such as ``layers.3.attn.q`` means the same on every architecture and on both engines. vLLM and
transformers name, fuse and split modules differently, so each has a place of its own for it, side by side in
one module for each kind of decoder. The residual stream's ``input`` and ``output`` are the block's own.
"""
