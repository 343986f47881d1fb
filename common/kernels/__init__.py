"""Compiled kernels, one package per kind of device. Must not know: models, requests, schedulers; only arrays."""
