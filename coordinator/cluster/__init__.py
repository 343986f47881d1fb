"""The workers as the coordinator sees them: connections, states, liveness and measured links.

Owns the control socket and the registry of workers. Must not know requests.
"""
