"""Routing: placement of requests on workers, circuit breakers and queue pressure.

Owns the ledger of capacity promised to requests. Pure; must not know sockets, clocks or the states of requests.
"""
