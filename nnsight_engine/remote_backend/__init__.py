"""Remote execution of blocks: requests, responses and results, used by clients, the server and engines."""
