"""Checkpoints as people publish them: made by the tests, tiny, each with one peculiarity of real ones."""
