"""Owns the simulation of worker pools on virtual time with a measured cost model, for capacity plans.

It must not know sockets or real time.
"""
