"""Owns the engine of every role: the scheduler (pure), the flat batch, the runner, and the samplers of CPUs and GPUs.

Must not know roles, sockets or HTTP: what differs between roles is given at construction.
"""
