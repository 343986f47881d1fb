"""Owns all measurement: load over HTTP, simulation, micro-benchmarks of kernels and links, model quality, and plots.

Product packages never import it, and load generation knows a server by its HTTP API alone.
"""
