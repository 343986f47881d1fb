"""Compiled kernels. Each kind has a package of its own; they know arrays, no models."""
