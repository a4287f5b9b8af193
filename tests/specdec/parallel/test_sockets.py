"""Where ranks listen, and what is said where they cannot, or where others could reach them."""

import errno
import os
import socket
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from specdec.base.errors import CapacityError
from specdec.parallel import sockets
from specdec.parallel.processes import launch
from specdec.parallel.processes.rendezvous import Rendezvous
from specdec.parallel.sockets import INTERFACES, check_loopback, listening, rank_sockets

ONE: list[dict[str, str]] = [
    {},
    {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "some-host"},
    {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1"},
]
SEVERAL = {
    "WORLD_SIZE": "4",
    "RANK": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.1.2.3",
    "MASTER_PORT": "29400",
}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Nothing of torchrun's."""
    for name in (
        "WORLD_SIZE",
        "RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        *INTERFACES,
    ):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize("started", ONE, ids=["by rank 0", "by torchrun", "by hand"])
def test_ranks_of_one_machine_use_loopback(
    started: dict[str, str], environment: pytest.MonkeyPatch
) -> None:
    """While groups are made; an interface that the user has named stays."""
    for name, value in started.items():
        environment.setenv(name, value)
    environment.setenv(INTERFACES[0], "mine")
    with rank_sockets():
        assert [os.environ.get(name) for name in INTERFACES] in (["mine", "lo"], ["mine", "lo0"])
    assert [os.environ.get(name) for name in INTERFACES] == ["mine", None]


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="asks Linux")
def test_ranks_of_several_machines_say_what_they_open(
    environment: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in SEVERAL.items():
        environment.setenv(name, value)
    with socket.create_server(("127.0.0.1", 0)) as old, ExitStack() as new:
        with rank_sockets():
            assert not any(name in os.environ for name in INTERFACES)
            opened = [new.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        ports = [made.getsockname()[1] for made in opened]
        assert {("127.0.0.1", port) for port in (*ports, old.getsockname()[1])} <= listening()
    [line] = [record.getMessage() for record in caplog.records]
    found = ", ".join(f"127.0.0.1:{port}" for port in sorted(ports))
    assert line.startswith(
        f"ranks on several machines meet at 10.1.2.3:29400, and this one listens on {found},"
        f" without a secret;"
    )


def test_a_folder_that_was_left_goes_with_the_next(
    environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Those that are held stay."""
    environment.setattr(tempfile, "tempdir", str(tmp_path))
    first, second = Rendezvous(), Rendezvous()
    first._held.close()  # as when its process has ended
    third = Rendezvous()
    assert {path.name for path in tmp_path.iterdir()} == {second.path.name, third.path.name}
    third.remove()
    assert [path.name for path in tmp_path.iterdir()] == [second.path.name]
    environment.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(
        CapacityError,
        match=r"ranks need a folder to meet in, and there is none: .*; set TMPDIR to one",
    ):
        Rendezvous()
    second.remove()


def test_without_loopback_the_start_says_so(environment: pytest.MonkeyPatch) -> None:
    """Before a process is started."""
    check_loopback()

    def refuse(*_: object, **__: object) -> socket.socket:
        raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))

    environment.setattr(sockets.socket, "create_server", refuse)
    environment.setattr(launch, "Workers", lambda _: pytest.fail("started"))
    with pytest.raises(
        CapacityError,
        match=r"nothing can be reached there \(Cannot assign requested address\); bring the"
        r" loopback",
    ):
        launch._start(2, launch.torch.device("cpu"))
