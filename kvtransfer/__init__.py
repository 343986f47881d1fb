"""The hand-off of KV blocks from one worker to another: plan, session state machines, frames and links.

Must not know: HTTP, routing, sampling, scheduling.
"""
