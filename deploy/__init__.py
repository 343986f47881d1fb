"""The top floor: puts the parts together. The ``tandem`` command, the local launcher, the worker process, manifests."""
