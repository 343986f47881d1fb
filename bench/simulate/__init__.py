"""Simulation of pools with a cost model, for plans. Knows no sockets."""
