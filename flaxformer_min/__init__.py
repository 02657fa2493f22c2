"""The 2017 Transformer, whole and exact, on today's JAX."""

__version__ = "0.1.0"
