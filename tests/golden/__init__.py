"""Owns the frozen behaviour of the system: the golden files, and the commands that record and compare them.

Only ``adapter`` and ``troubles`` may import modules under test.
"""
