"""Which workers serve a request: placement, circuit breakers, queue pressure. Pure; knows no socket and no request
state."""
