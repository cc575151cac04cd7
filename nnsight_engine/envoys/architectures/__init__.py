"""Standard points: one name per place in the model, independent of the architecture's module names.

``table`` lists the places, ``architecture`` finds them in a model, ``points`` reads and writes them.
"""
