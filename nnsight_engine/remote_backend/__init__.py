"""Remote execution of blocks: requests to a server, its responses, and the transfer of results to the caller.

``messages`` and ``frames`` define the data that is exchanged, ``transport`` the channel, and ``outcomes`` the
results of blocks. The server and the engines that run blocks in other processes use the same modules.
"""
