"""A stand-in for Kubernetes in tests: renders the manifests of deploy/kubernetes, checks them against schemas, and
obeys them with real processes on this machine."""
