"""The Triton kernels of vLLM's model runner V2 as vectorised torch functions, for CPUs without Triton.

Functions take the arguments they need by the kernel's names, in lower case and without ``_ptr``. Results
equal those of the kernels, but for the order of sums.
"""
