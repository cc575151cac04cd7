"""Python for strangers: a part of the language in which nothing can be said that does harm, and its budgets.

Code is changed before it is compiled (``rewriting``): each attribute goes through a guard that knows the
type (``attributes``, ``tables``), each loop and function counts a step (``budget``), each operator that could
fill the memory is looked at first (``guards``, ``sizes``), and names mean what is on a list (``modules``).
There is no way from one of these objects to anything else of the process; that is the invariant.

It protects by itself what it can: files, sockets, other requests' values, other objects of this process, and
loops and containers without end. It cannot stop one call of torch that runs for hours or crashes; that takes
a process of its own. Readers of code give ``restricted_policy(budget)`` to ``decode_blocks``.
"""

from nnsight_engine.sandbox.restricted.budget import Budget
from nnsight_engine.sandbox.restricted.policy import restricted_policy

__all__ = ["Budget", "restricted_policy"]
