"""Python traces of requests in the vLLM worker: block threads, row slicing, steps, transport of results."""
