"""Building blocks of every layer: points, the model's description, errors; imports none of our packages."""
