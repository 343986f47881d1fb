"""Owns the reading of checkpoint directories: which files there are and what they contain. Light, since the coordinator
reads them too; it must not import torch or transformers."""
