"""Values of blocks on both sides: received blocks, their outcomes, references to objects of both sides."""
