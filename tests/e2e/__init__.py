"""Whole systems: real processes started by the real command and used over HTTP only."""
