"""One module for each way of doing the tasks; each runs in a child that has its library."""
