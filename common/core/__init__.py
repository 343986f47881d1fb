"""Owns the types that every package uses: ids, errors, requests, sequences and timeouts. Pure (no I/O, clock or
threads); it must not import any other package of this repository."""
