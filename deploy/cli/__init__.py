"""The ``tandem`` command line: the registry of commands, their dispatch, chat and scale. Must not know how processes
are started or supervised, which :mod:`deploy.launcher` owns."""
