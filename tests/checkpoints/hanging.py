"""A converter that never ends, for the test of its timeout."""

import signal

signal.pause()
