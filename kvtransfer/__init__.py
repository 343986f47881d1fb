"""The hand-off of KV blocks from a prefill to a decode worker: plan, state machines, frames, links; see PROTOCOL.md.

Must not know: HTTP, routing, sampling, scheduling.
"""
