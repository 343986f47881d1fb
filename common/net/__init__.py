"""Owns how processes talk: sockets, messages and their wire format, cluster keys and addresses. It must not know the
state of any request."""
