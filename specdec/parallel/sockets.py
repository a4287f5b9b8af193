"""Where the ranks of a group listen: on the loopback interface alone, unless they are on several
machines or told otherwise.
"""

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specdec.base.errors import CapacityError

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables by which users name an interface; theirs is taken."""

_LISTENING = "0A"  # as the kernel calls it

logger = logging.getLogger(__name__)


def check_loopback() -> None:
    """Raises where processes of this machine cannot reach each other.

    Raises:
        CapacityError: the loopback interface is down.
    """
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), 5),
        ):
            return
    except OSError as error:
        raise CapacityError(
            f"the ranks of a group meet at 127.0.0.1, and nothing can be reached there"
            f" ({error.strerror or error}); bring the"
            " loopback interface up (ip link set lo up), or leave out tensor_parallel"
        ) from error


@contextmanager
def rank_sockets() -> Iterator[None]:
    """Within it groups are made; ranks on several machines say what they have opened."""
    if not on_one_machine():
        before = listening()
        yield
        places = ", ".join(f"{host}:{port}" for host, port in sorted(listening() - before))
        found = places or "ports of their own"
        logger.warning(
            "ranks on several machines meet at %s:%s, and this one listens on %s, without a secret;"
            " keep strangers out of that"
            " network, or name an interface with %s",
            os.environ.get("MASTER_ADDR"),
            os.environ.get("MASTER_PORT"),
            found,
            " and ".join(INTERFACES),
        )
        return
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    own = {name: loopback for name in INTERFACES if name not in os.environ and loopback is not None}
    os.environ.update(own)
    try:
        yield
    finally:
        for name in own:
            os.environ.pop(name, None)


def on_one_machine() -> bool:
    """Whether all ranks of `torchrun` are here; so are those that rank 0 starts."""
    size = os.environ.get("WORLD_SIZE", "1") if "RANK" in os.environ else "1"
    here = os.environ.get("MASTER_ADDR", "") in ("localhost", "127.0.0.1", "::1")
    return size == "1" or here or os.environ.get("LOCAL_WORLD_SIZE") == size


def listening(process: int | str = "self") -> set[tuple[str, int]]:
    """Addresses and ports at which a process takes connections over TCP; empty where the system is
    not Linux.
    """
    folder, own = Path(f"/proc/{process}"), set()
    for entry in folder.glob("fd/*"):
        try:
            own.add(os.readlink(entry))
        except OSError:  # closed meanwhile
            continue
    found = set()
    for table in (folder / "net/tcp", folder / "net/tcp6"):
        rows = table.read_text().splitlines()[1:] if table.exists() else []
        for address, state, number in ((row[1], row[3], row[9]) for row in map(str.split, rows)):
            if state == _LISTENING and f"socket:[{number}]" in own:
                host, _, port = address.partition(":")
                found.add((_readable(host), int(port, 16)))
    return found


def _readable(host: str) -> str:
    """An address as the kernel writes it, in words of 4 bytes that begin with the last.

    >>> _readable("0100007F"), _readable("0" * 24 + "01000000")
    ('127.0.0.1', '::1')
    """
    words = [bytes.fromhex(host[at : at + 8])[::-1] for at in range(0, len(host), 8)]
    return socket.inet_ntop(socket.AF_INET6 if len(words) > 1 else socket.AF_INET, b"".join(words))
