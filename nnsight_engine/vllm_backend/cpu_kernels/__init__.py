"""The Triton kernels of vLLM's model runner V2 as vectorised torch functions, for CPUs without Triton.

A launch ``kernel[grid](*arguments)`` reaches a function that takes the arguments it needs by the names that
vLLM's kernel gives them, in lower case and without ``_ptr``. Strides and block sizes are left out: tensors
know theirs. Each file has a table of its functions by kernel; ``install`` puts all of them in place.

Results equal those of the kernels, with two exceptions: sums are taken in another order, and drafts are
accepted by uniform numbers of another stream than Triton's. A kernel or option that has no function here
raises ``NotImplementedError`` with its name.
"""
