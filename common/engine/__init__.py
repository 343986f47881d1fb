"""Owns the engine of every role: the scheduler (pure), the flat batch, the runner and the sampler.

Must not know roles, sockets or HTTP: what differs between roles is given at construction.
"""
