"""Unit tests: one package at a time without the others, mostly without processes and without a model."""
