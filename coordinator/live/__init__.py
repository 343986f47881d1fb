"""What a running system looks like: rows of workers, figures of the last minutes, and the feed that pages listen to.

Owns the rings of the last minutes and the bounds on listeners. Must not know HTTP, and changes nothing that it watches.
"""
