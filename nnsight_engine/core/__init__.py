"""Building blocks of every layer: points, the model's description, errors. Imports no other package of ours."""
