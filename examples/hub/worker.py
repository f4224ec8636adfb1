"""One of three actors: squares numbers for whoever asks. Start as many as you like of other names."""
# ruff: noqa: INP001, T201 - a script, and printing is its work

from __future__ import annotations

import os
import sys

from tailrace.client import ClientError
from tailrace.client.hub import Hub

ADDRESS = "@(demo/worker)"


def main() -> None:
    url = os.environ.get("TAILRACE_ENDPOINT", "http://127.0.0.1:4437")
    with Hub(url, address=ADDRESS) as hub:
        print(f"{ADDRESS} at {url}", flush=True)
        # Its messages are kept in a mailbox, and each is done with when the next is asked for: a crash of the
        # server, or of this program, costs none.
        for message in hub.follow(ADDRESS):
            print(f"{message.sender} {message.type} {message.data}", flush=True)
            if message.wants_reply:
                number = int(message.data["n"])
                hub.reply(message, {"square": number * number})


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except ClientError as error:
        sys.exit(f"{error}\nStart a server first: tailrace serve")
