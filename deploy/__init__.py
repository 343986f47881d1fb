"""The composition root: the ``tandem`` command, the local launcher and the worker process. Starts and connects the
other packages, must not implement serving itself, and nothing but tests imports it."""
