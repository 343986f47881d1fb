"""Experiments on one mechanism each (control latency, hand-off cost, lent cores, the wire). They may enter every
package."""
