"""Standard points: one name for a place in the model, whatever the architecture calls its modules.

``table`` says where the places are, ``architecture`` finds them in a model, ``points`` reads and writes them.
"""
