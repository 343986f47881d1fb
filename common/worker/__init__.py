"""The loop that every worker runs, its membership of the cluster, and its accounts of steps. Knows no role."""
