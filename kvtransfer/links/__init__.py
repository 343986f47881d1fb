"""Links move the bytes of a hand-off: one module per transport, with the interface in ``base.py``.

Must not know: sessions, timers, credit.
"""
