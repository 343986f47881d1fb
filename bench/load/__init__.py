"""Owns load generation: arrival times, prompts, an HTTP client, metrics, result files and plots.

It must not know a server's internals: servers are reached over HTTP alone.
"""
