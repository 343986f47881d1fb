"""How the bytes of a hand-off move: one file per transport, one contract in ``base.py``."""
