"""Running a model and the blocks that watch it in turns: mediators, the interleaver, batching, barriers."""
