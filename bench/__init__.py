"""Measurements: load over HTTP, kernels and links, and their plots."""
