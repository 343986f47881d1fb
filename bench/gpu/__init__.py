"""Measurements on one GPU, in stages: kernels against their oracle, limits of the card, the goals G1 to G8.

Every stage runs on a CPU, too, with tiny shapes (``--dry``), so that a short window on a GPU is not spent on mistakes.
"""
