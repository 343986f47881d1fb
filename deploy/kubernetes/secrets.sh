#!/usr/bin/env bash
# Print new Secrets for the manifests of this folder: `deploy/kubernetes/secrets.sh | kubectl apply -n tandem -f -`.
# Each role gets only the keys that it needs. Nothing is kept on disk: to add a host outside the cluster, make the cluster
# key with `tandem keygen` and pass it: `deploy/kubernetes/secrets.sh cluster.key`.
set -euo pipefail
umask 077
tandem=${TANDEM:-$(dirname "$0")/../../.venv/bin/tandem}
work=$(mktemp -d)
trap 'rm -r "$work"' EXIT
key() { head -c 32 /dev/urandom | base64 | tr '+/' '-_' | tr -d '=\n'; }
secret() { # NAME KEY, the value on standard input
    printf -- '---\napiVersion: v1\nkind: Secret\nmetadata:\n  name: %s\n  labels:\n    app.kubernetes.io/name: tandem\n' "$1"
    printf 'type: Opaque\ndata:\n  %s: %s\n' "$2" "$(base64 | tr -d '\n')"
}

cluster=${1:-$work/cluster.key}
[[ $# -gt 0 ]] || "$tandem" keygen --out "$cluster" >/dev/null
for role in coordinator prefill decode; do
    "$tandem" keygen --role "$role" --cluster-key-file "$cluster" --out "$work/$role.key" >/dev/null
    secret "tandem-$role-key" cluster.key <"$work/$role.key"
done
client=$(key) metrics=$(key)
printf '%s\n%s\n' "$client" "$metrics" | secret tandem-api-keys keys.txt # the first one is for clients
printf '%s' "$metrics" | secret tandem-metrics-key key
key | secret tandem-admin-key key
