"""Owns what the operating system and the GPU driver offer: processors, threads, memory, GPUs, file limits, secrets,
logging.

Must not know models, messages or roles.
"""
