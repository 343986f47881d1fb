"""Owns the making of the built-in model: the corpus that it is trained on, and its training.

It must not know serving code, and serving code never imports it.
"""
