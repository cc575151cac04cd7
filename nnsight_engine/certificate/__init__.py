"""The certificate of a model: each of its points on vLLM, compared with transformers.

``certify`` runs the same prompt on both engines and compares what a user can read and change: the value of
each point, the effect of a change at it, skipped layers, and what the model computes without interventions.
The comparison knows no families of models: it asks both engines for their points.
"""
