"""Where ranks of one machine meet: a folder that no other user may look into."""

import fcntl
import shutil
import tempfile
from pathlib import Path

from specdec.base.errors import CapacityError

PREFIX = "specdec-ranks-"


class Rendezvous:
    """A folder in which ranks tell each other at which ports they listen; made by rank 0.

    NCCL looks for its file until the process has ended, and waits minutes for one that is gone. So
    what earlier processes have left is removed here: all folders that nobody holds any more.

    Raises:
        CapacityError: there is no room for one.

    Attributes:
        path: of the folder.
    """

    def __init__(self) -> None:
        for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/held"):
            try:
                with left.open() as held:
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(left.parent, ignore_errors=True)
            except OSError:  # somebody holds it, or it is another user's
                continue
        try:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
            self._held = (self.path / "new").open("w")
            fcntl.flock(self._held, fcntl.LOCK_EX)
            (self.path / "new").rename(self.path / "held")
        except OSError as error:
            what = f"ranks need a folder to meet in, and there is none: {error}"
            raise CapacityError(f"{what}; set TMPDIR to one") from error

    def remove(self) -> None:
        """Takes it away."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._held.close()
