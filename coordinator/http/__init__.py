"""The HTTP server: connections, middleware, endpoints and streams. Must not know how a request is placed on workers: it
submits request records to the dispatcher and receives their tokens."""
