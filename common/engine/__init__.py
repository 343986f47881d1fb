"""One engine for every role: the planner (pure), the batch, the runner and the sampler.

Must not know: roles, sockets, HTTP. What differs between roles is given at construction.
"""
