"""Sockets with the limits and habits that libzmq does not have by itself."""

from __future__ import annotations

import zmq

from common.channel import bind_router, connect_dealer


def test_who_dials_anew_is_heard_though_the_end_of_its_old_connection_was_not_read_yet() -> None:
    """A link that was cut comes back while the listener is in a long step: both are news to it, in any order."""
    with zmq.Context() as context, bind_router(context, "tcp://127.0.0.1:*") as router:
        address = router.getsockopt_string(zmq.LAST_ENDPOINT)
        with router.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED) as connected:
            old = connect_dealer(context, address, b"peer")
            old.send(b"before")
            assert router.poll(5000) and router.recv_multipart() == [b"peer", b"before"]
            assert connected.poll(5000) and connected.recv_multipart()
            with connect_dealer(context, address, b"peer") as new:
                assert connected.poll(5000)  # without a look at the router, which knows only the old connection
                router.disable_monitor()
                old.close(linger=0)
                new.send(b"after")
                assert router.poll(5000) and router.recv_multipart() == [b"peer", b"after"]
                router.send_multipart([b"peer", b"answer"])
                assert new.poll(5000) and new.recv() == b"answer"
