"""``tandem bench goals``: the goals C1 to C12 on two cores, measured beside this machine's limits and a peer.

Each goal is one function. It puts load on the systems that it compares, in turn and in rounds, and returns rows: value,
calibrated limit, the peer's value, their ratio, the target, and whether it is met.

    figures       rows, targets and the table: pure
    field         the systems that are compared, started when a goal needs them, and their loads
    calibration   steps of one core beside what the core can read and multiply
    engine        C1, C2, C3, C7: decode, prefill and a worker's turn on one core
    turns         the loop of a real worker, turn by turn
    handoff       C4, C5: what the hand-off of KV costs
    coordinator   C6: what the coordinator costs, around the workers of mocks, which compute nothing
    interference  C8: running streams beside long prompts
    goodput       C9: the highest rate inside the objectives
    saturation    C10, C11: throughput when all requests are sent at once
    start         C12: from the command to the first token
    checkpoint    the model that is measured, with random weights
"""
