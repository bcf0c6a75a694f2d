"""A model to text: engine.py runs many requests at once, sampling.py draws tokens."""
