"""Hypothesis tests of invariants, against models that are slow and obvious."""
