"""``tandem scale``: resizes the worker pools of a running ``tandem up``."""

from __future__ import annotations

import sys

from common.config.scale import ScaleConfig
from common.core.errors import StartError, reason
from common.net.http_client import HttpClient, HttpError, shown

PATIENCE_S = 1800.0
"""Request timeout in seconds. Loading a model and draining a worker may take long."""


def run(config: ScaleConfig) -> int:
    """Resize the pools, wait until they have the new sizes, and print these. Raises StartError with the server's reason
    if that is not possible."""
    if config.prefill is None and config.decode is None:
        raise StartError("there is nothing to change", "neither pool was named", "give --prefill N, --decode M or both")
    if config.decode == 0:
        why = "tokens after the first come from a decode worker"
        raise StartError("--decode 0 would stop all serving", why, "give --decode 1 or more")
    request = {"prefill": config.prefill, "decode": config.decode}
    wanted = ", ".join(f"{pool} {size}" for pool, size in request.items() if size is not None)
    print(f"scaling to {wanted}: new workers load the model, others finish their requests", file=sys.stderr, flush=True)
    try:
        pools = HttpClient(config.url, config.api_key, PATIENCE_S).post("/admin/scale", request)
    except OSError as error:
        why = reason(error)
        raise StartError(
            f"cannot reach {shown(config.url)}", why, "start it with `tandem up`, or give --url"
        ) from error
    except HttpError as error:
        raise StartError(
            "the pools were not resized as requested", str(error), error.todo("see GET /admin/workers", admin=True)
        ) from error
    print(f"prefill {pools['prefill']}, decode {pools['decode']}")
    return 0
