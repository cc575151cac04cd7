"""Blocks that run on a server: what a client says to it, what it answers, and how that comes home.

``messages`` and ``frames`` are what travels, ``transport`` how, ``outcomes`` what came of the blocks. The
server and the engines that run blocks elsewhere use the same parts.
"""
