"""Whether training can be trusted: python -m benchmarks.reliability (make reliability).

Black-box experiments: they run train.py in processes of their own, stop, starve and damage it, and
look at what is on the disk; a few call public functions. Every experiment is seeded.
"""
