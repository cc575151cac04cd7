"""The Triton kernels of vLLM's model runner V2 as vectorised torch functions, for CPUs without Triton.

A launch ``kernel[grid](*arguments)`` reaches a function that takes the arguments it needs by the names that
vLLM's kernel gives them, in lower case and without ``_ptr``. Strides and block sizes are left out: tensors
know theirs. ``install`` has a table of the functions by kernel, and puts all of them in place.

Results equal those of the kernels, but that sums are taken in another order. ``unsupported_options``
refuses the options whose kernels have no function here.
"""
