"""A port that is held is nobody else's, and the server's that it is held for."""

from __future__ import annotations

import errno
import socket

import pytest
from vllm_ports import hold_port, number_of


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_a_server_listens_at_a_port_that_nobody_else_can_have(address: str) -> None:
    with hold_port() as held:
        port = number_of(held)
        for _ in range(2):  # started again, it has the same
            with socket.socket() as other, pytest.raises(OSError, match=rf"Errno {errno.EADDRINUSE}"):
                other.bind((address, port))
            with socket.create_server((address, port)), socket.create_connection(("127.0.0.1", port), timeout=60):
                pass
