"""Dictionaries of features: sparse autoencoders and transcoders in SAELens' layout, their maths and files."""
