"""Owns the loop that every worker runs, its membership of the cluster, its step times and the encoding of its output.

Must not know what a role (prefill, decode) does with a request.
"""
