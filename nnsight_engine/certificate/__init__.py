"""The certificate of a model: each of its points on vLLM, compared with transformers.

The comparison knows no families of models: it asks both engines for their points.
"""
