"""Sockets, wire format, messages, keys and addresses between processes. Knows no request's state."""
