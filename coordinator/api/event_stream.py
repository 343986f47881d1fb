"""What the event streams of all OpenAI endpoints have in common: how they end, stay alive and report an error."""

from __future__ import annotations

from common.core.errors import RequestError
from coordinator.api.delta_encoder import encode
from coordinator.requests.spec import Json

KEEPALIVE = b"\n\n"
"""Sent on an idle stream: two line breaks, which the event-stream format ignores. Clients that split the stream at
double line breaks ignore them too, whereas they would prepend a comment or a single line break to the next event."""
DONE = b"data: [DONE]\n\n"


def error_body(error: RequestError) -> Json:
    """Return ``error`` as OpenAI's error object."""
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def named_event(kind: str, data: Json) -> bytes:
    """Return a server-sent event with a name, which ``data`` has as its ``type`` too."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode({"type": kind, **data}))


class ChunkStream:
    """The stream of chat and text completions, whose chunks have no names; a last line says that it is complete. Base
    class of their shapes."""

    needs_pieces = False
    keepalive = KEEPALIVE

    def begin(self, usage: object) -> bytes:
        """Return the events before the first chunk: there are none."""
        return b""

    def done(self) -> bytes:
        """Return what ends a complete stream."""
        return DONE

    def failed(self, error: RequestError) -> bytes:
        """Return the events that end a stream with ``error``."""
        return b"data: " + encode(error_body(error)) + b"\n\n" + DONE
