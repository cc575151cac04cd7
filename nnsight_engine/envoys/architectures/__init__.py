"""Standard points: one name per place in the model, independent of the architecture's module names."""
