"""Remote execution of blocks: requests to a server, its responses, and the transfer of results to the caller.

The modules here hold the data that is exchanged, ``values`` the results of blocks, ``sending`` and ``client``
the client's side. The server and the engines that run blocks in other processes use the same modules.
"""
