"""How much a caller may do, found out before any work is done for them."""
