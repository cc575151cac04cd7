"""The steps of live requests, in the worker: kernels batched over requests, and their results."""
