"""What more than one room needs.

The light half (ids, errors, request, sequence, kv.{layout,pool,table,prefix,cache}, wire, messages, channel, metrics,
config, log) imports no torch and starts at once; the heavy half (device, model, attention, kv.store, engine) is where
torch lives. Must not know: roles, routing, HTTP.
"""
