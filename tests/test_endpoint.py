"""The port that a server of our own is given."""

import socket

import pytest

from hangdoctor import endpoint
from hangdoctor.errors import InputError


def test_every_port_that_sglang_counts_from_ours_is_one():
    assert max(endpoint._PORTS) + max(endpoint._SGLANG_COUNTS) <= 65_535
    assert endpoint.free_port() in endpoint._PORTS


@pytest.mark.parametrize("further", endpoint._SGLANG_COUNTS)
def test_a_port_is_passed_over_where_one_that_is_counted_from_it_is_taken(monkeypatch, further):
    with socket.socket() as listener:
        port = endpoint.free_port()
        listener.bind(("127.0.0.1", port + further))
        listener.listen()
        monkeypatch.setattr(endpoint, "_PORTS", range(port, port + 1))
        with pytest.raises(InputError, match="is free for a server"):
            endpoint.free_port()
