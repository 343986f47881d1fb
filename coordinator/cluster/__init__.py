"""The workers: their connections, states, liveness and links. Knows no request."""
