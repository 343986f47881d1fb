"""Requests from admission to their last token: records, state machine, admission control, dispatch.

Owns the queue, the retries and the accepted tokens of every request. Must not know HTTP or text.
"""
