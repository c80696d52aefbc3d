"""A port for a server that is about to be started, by its number alone.

In: nothing. Out: a number that nobody else is given until the server has it, and after. Never: a number that was let go
of and may be another's by now.
"""

from __future__ import annotations

import socket


def hold_port() -> socket.socket:
    """Bound to a port of 127.0.0.1, for the caller to close once the server has ended.

    The system gives a port that is bound to nobody who asks for any. It lets one socket listen beside those that only
    hold, if all of them reuse addresses, as servers do: vLLM, uvicorn, ZeroMQ.
    """
    held = socket.socket()
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
    except OSError:
        held.close()
        raise
    return held


def number_of(held: socket.socket) -> int:
    return int(held.getsockname()[1])
