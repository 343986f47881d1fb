"""Owns the measurement of quality: the golden set with its checks, and perplexity and agreement against a reference.

It must not know a server's internals.
"""
