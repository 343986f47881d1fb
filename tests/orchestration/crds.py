"""JSON schemas of the custom resources in deploy/kubernetes: the fields that Tandem's manifests use, with their types.

Written by hand from the definitions of their projects and stricter than those: a field that is not listed here is an
error, so a new one has to be looked up. Pod templates in them are checked as pods.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
_DURATION = {"type": "string", "pattern": r"^([0-9]+(ms|s|m|h))+$"}
_NAME = {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", "maxLength": 253}
_LABELS = {"type": "object", "additionalProperties": {"type": "string", "maxLength": 63}}
_PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
_INT_OR_PERCENT = {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": "^[0-9]+%$"}]}


def _object(required: tuple[str, ...] = (), **properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def _list(of: Schema, least: int = 1) -> Schema:
    return {"type": "array", "items": of, "minItems": least}


def _resource(version: str, kind: str, spec: Schema) -> Schema:
    return _object(
        ("apiVersion", "kind", "metadata", "spec"),
        apiVersion={"const": version},
        kind={"const": kind},
        metadata=_object(
            ("name", "namespace"),
            name=_NAME,
            namespace=_NAME,
            labels=_LABELS,
            annotations={"type": "object", "additionalProperties": {"type": "string"}},
        ),
        spec=spec,
    )


_SCALING_RULES = _object(
    stabilizationWindowSeconds={"type": "integer", "minimum": 0, "maximum": 3600},
    selectPolicy={"enum": ["Max", "Min", "Disabled"]},
    policies=_list(
        _object(
            ("type", "value", "periodSeconds"),
            type={"enum": ["Pods", "Percent"]},
            value={"type": "integer", "minimum": 1},
            periodSeconds={"type": "integer", "minimum": 1, "maximum": 1800},
        )
    ),
)
_SECRET_KEY = _object(("name", "key"), name=_NAME, key={"type": "string"}, optional={"type": "boolean"})
_TEMPLATE = _object(("spec",), metadata=_object(labels=_LABELS), spec={"type": "object"})

SCHEMAS: dict[str, Schema] = {
    "PodMonitor": _resource(
        "monitoring.coreos.com/v1",
        "PodMonitor",
        _object(
            ("selector", "podMetricsEndpoints"),
            jobLabel={"type": "string"},
            selector=_object(matchLabels=_LABELS),
            podMetricsEndpoints=_list(
                _object(
                    port={"type": "string"},
                    path={"type": "string", "pattern": "^/"},
                    interval=_DURATION,
                    scrapeTimeout=_DURATION,
                    authorization=_object(type={"type": "string"}, credentials=_SECRET_KEY),
                )
            ),
        ),
    ),
    "ScaledObject": _resource(
        "keda.sh/v1alpha1",
        "ScaledObject",
        _object(
            ("scaleTargetRef", "triggers"),
            scaleTargetRef=_object(("name",), apiVersion={"type": "string"}, kind={"type": "string"}, name=_NAME),
            minReplicaCount={"type": "integer", "minimum": 0},
            maxReplicaCount={"type": "integer", "minimum": 1},
            pollingInterval={"type": "integer", "minimum": 1},
            cooldownPeriod={"type": "integer", "minimum": 0},
            advanced=_object(
                horizontalPodAutoscalerConfig=_object(
                    behavior=_object(scaleUp=_SCALING_RULES, scaleDown=_SCALING_RULES)
                )
            ),
            triggers=_list(
                _object(
                    ("type", "metadata"),
                    type={"const": "prometheus"},
                    name={"type": "string"},
                    metricType={"enum": ["AverageValue", "Value"]},
                    metadata=_object(
                        ("serverAddress", "query", "threshold"),
                        serverAddress={"type": "string", "pattern": "^https?://"},
                        query={"type": "string"},
                        threshold={"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?$"},
                        activationThreshold={"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?$"},
                        ignoreNullValues={"enum": ["true", "false"]},
                    ),
                )
            ),
        ),
    ),
    "InferencePool": _resource(
        "inference.networking.k8s.io/v1",
        "InferencePool",
        _object(
            ("selector", "targetPorts", "endpointPickerRef"),
            selector=_object(("matchLabels",), matchLabels=_LABELS),
            targetPorts=_list(_object(("number",), number=_PORT)) | {"maxItems": 8},
            endpointPickerRef=_object(
                ("name", "port"),
                group={"type": "string"},
                kind={"type": "string"},
                name=_NAME,
                port=_object(("number",), number=_PORT),
                failureMode={"enum": ["FailOpen", "FailClose"]},
            ),
        ),
    ),
    "HTTPRoute": _resource(
        "gateway.networking.k8s.io/v1",
        "HTTPRoute",
        _object(
            parentRefs=_list(
                _object(
                    ("name",),
                    group={"type": "string"},
                    kind={"type": "string"},
                    name=_NAME,
                    namespace=_NAME,
                    sectionName={"type": "string"},
                )
            ),
            hostnames=_list({"type": "string"}),
            rules=_list(
                _object(
                    matches=_list(
                        _object(
                            path=_object(
                                type={"enum": ["Exact", "PathPrefix", "RegularExpression"]},
                                value={"type": "string", "pattern": "^/"},
                            )
                        )
                    ),
                    backendRefs=_list(
                        _object(
                            ("name",),
                            group={"type": "string"},
                            kind={"type": "string"},
                            name=_NAME,
                            namespace=_NAME,
                            port=_PORT,
                            weight={"type": "integer", "minimum": 0},
                        )
                    ),
                    timeouts=_object(request=_DURATION, backendRequest=_DURATION),
                )
            ),
        ),
    ),
    "LeaderWorkerSet": _resource(
        "leaderworkerset.x-k8s.io/v1",
        "LeaderWorkerSet",
        _object(
            ("leaderWorkerTemplate",),
            replicas={"type": "integer", "minimum": 0},
            startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
            networkConfig=_object(("subdomainPolicy",), subdomainPolicy={"enum": ["Shared", "UniquePerReplica"]}),
            rolloutStrategy=_object(
                ("type",),
                type={"const": "RollingUpdate"},
                rollingUpdateConfiguration=_object(
                    partition={"type": "integer", "minimum": 0},
                    maxSurge=_INT_OR_PERCENT,
                    maxUnavailable=_INT_OR_PERCENT,
                ),
            ),
            leaderWorkerTemplate=_object(
                ("workerTemplate",),
                size={"type": "integer", "minimum": 1},
                restartPolicy={"enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
                leaderTemplate=_TEMPLATE,
                workerTemplate=_TEMPLATE,
            ),
        ),
    ),
}
"""Schemas by kind."""
