"""Invariants under everything that hypothesis can think of, against models that are slow and obvious."""
