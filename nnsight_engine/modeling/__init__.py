"""Models as people hold them: where weights come from, and the classes that wrap them."""
