"""Owns what the operating system offers: processors, threads, memory allocator, file limits, secret files, logging.

Must not know models, messages or roles.
"""
