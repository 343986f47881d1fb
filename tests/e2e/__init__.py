"""Whole systems: real processes behind the real command, spoken to over HTTP only."""
