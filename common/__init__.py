"""Everything that more than one top-level package needs; it must not know roles, routing or the HTTP API.

The light half (core, net, config, checkpoint, kv, worker, platform; not kv.storage.tensors, platform.device and
worker.loop) imports no torch and starts fast. The heavy half (engine, model, attention, kernels) imports torch.
"""
