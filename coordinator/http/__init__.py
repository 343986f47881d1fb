"""The HTTP server: connections, middleware, endpoints, streams. Knows requests by their records, and no worker."""
