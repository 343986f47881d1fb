#!/usr/bin/env bash
# Start a cluster process by process, with keys, as on several hosts; here all on this machine. Ctrl-C stops it.
#
#     examples/by_hand.sh [MODEL]
#
# On two hosts: copy cluster.key to the other one, start the decode worker there with --host set to its own address, and
# use the coordinator's address instead of 127.0.0.1 (docs/operate/several-hosts.md).
set -euo pipefail

model=("$@")
tandem=${TANDEM:-.venv/bin/tandem}
port=${PORT:-8000} control=${CONTROL_PORT:-8001}
keys=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null; wait; rm -r "$keys"' EXIT
trap exit INT TERM

"$tandem" keygen --out "$keys/cluster.key"
# One key file per role: a prefill host then cannot pose as a decode worker.
for role in coordinator prefill decode; do
    "$tandem" keygen --role $role --cluster-key-file "$keys/cluster.key" --out "$keys/$role.key"
done

"$tandem" coordinator "${model[@]}" --port "$port" --control-port "$control" \
    --expect-prefill 1 --expect-decode 1 --cluster-key-file "$keys/coordinator.key" &
"$tandem" prefill "${model[@]}" --workers-on-host 2 --coordinator "127.0.0.1:$control" \
    --cluster-key-file "$keys/prefill.key" &
"$tandem" decode "${model[@]}" --workers-on-host 2 --coordinator "127.0.0.1:$control" \
    --cluster-key-file "$keys/decode.key" &
wait -n # the first process that ends ends all
