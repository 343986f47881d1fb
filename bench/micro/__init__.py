"""Experiments on one mechanism each, run by ``tandem bench``: control latency, hand-off cost, lent cores, the wire,
other load generators. They may import every package and must not be imported by the product."""
