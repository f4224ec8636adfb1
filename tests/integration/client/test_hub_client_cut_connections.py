"""The client of the hub while connections are cut at random: nothing accepted is lost or kept twice."""

from __future__ import annotations

import threading
from itertools import pairwise

import pytest

from support.calls import eventually
from support.cutting_proxy import CuttingProxy, at_random
from support.hub_clients import WAIT_S, fresh_address
from support.server import ServerProcess
from tailrace.client import Client, Retries
from tailrace.client.hub import Hub, Timeouts

MESSAGES = 150
PERSISTENT = Retries(delay_s_first=0.01, delay_s_max=0.05, attempts_max=100)


@pytest.mark.parametrize("seed", range(3))
def test_h20_h21_h33_accepted_messages_arrive_in_order_and_are_kept_once(
    server: ServerProcess, seed: int
) -> None:
    address = fresh_address("cuts")
    received: list[int] = []
    with CuttingProxy(server.port, at_random(seed=seed, share=0.04)) as proxy:

        def opened(own: str) -> Hub:
            timeouts = Timeouts(ask_s=2 * WAIT_S)
            return Hub(proxy.base_url, address=own, retries=PERSISTENT, timeouts=timeouts)

        def receive() -> None:
            with opened(address) as hub:
                for message in hub.follow():
                    received.append(message.data)
                    if message.data == MESSAGES - 1:
                        hub.commit(message)
                        return

        with opened(fresh_address("cuts")) as sender:
            receiving = threading.Thread(target=receive, daemon=True)
            receiving.start()
            # A mailbox is made by whoever registers; before that there is nobody to send to.
            eventually(lambda: list(sender.discover(address)), bool)
            acks = [
                sender.send(address, "n", number, ack="accepted", producer=("p", 0, number))
                for number in range(MESSAGES)
            ]
            receiving.join(2 * WAIT_S)
        assert proxy.cuts > 10
    assert not receiving.is_alive()
    assert list(dict.fromkeys(received)) == list(range(MESSAGES))
    assert all((one.offset or "") < (other.offset or "") for one, other in pairwise(acks))
    with Client(server.base_url) as client:
        kept = list(client.stream(f"hub/mbox/{address[2:-1]}").entries())
    assert [entry["payload"] for entry in kept] == list(range(MESSAGES))
