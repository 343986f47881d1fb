"""``tandem bench goals``: what this system wants to reach on two cores, measured and beside its limits and peers.

Goals have numbers, C1 to C12. Each is one small function that puts load on the systems it compares in turn, round by
round within one run, and returns rows: value, calibrated limit, the peer's value, ratio, what is wanted, met or not.

    figures       rows, targets and the table: pure
    field         the systems that are compared, started when a goal needs them, and the loads they get
    engine        C1, C2, C3, C7: steps of one core against what the core can read and multiply
    handoff       C4, C5: what it costs that KV travels
    coordinator   C6: what the coordinator costs, with workers that compute nothing
    serving       C8 to C12: interference, goodput, saturation, start
    checkpoint    the model that is measured: random weights, made here
"""
