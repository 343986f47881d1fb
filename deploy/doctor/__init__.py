"""Owns the checks of ``tandem doctor``: of this machine, of a configuration, and of a running system as its HTTP API
shows it. It must not start workers, nor change anything."""
