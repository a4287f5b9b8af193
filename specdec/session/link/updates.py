"""Other weights for a drafter, loaded beside the engine."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from specdec.base.errors import CapacityError, SpecDecError
from specdec.session.forks import tell_of_exit

logger = logging.getLogger(__name__)

Done = Callable[[BaseException | None], object]
"""Called with what became of an update: None where the new weights draft."""


class Updates:
    """Has other weights draft, one update at a time, in a thread, while steps go on.

    Args:
        update: does it, by the name of a checkpoint.
        call: has something called where the engine is stepped.
    """

    def __init__(
        self, update: Callable[[str], object], call: Callable[[Callable[[], object]], object]
    ) -> None:
        self._update, self._call = update, call
        self._busy = False
        self._thread: threading.Thread | None = None
        tell_of_exit(self)

    def begin(self, name: str, done: Done) -> None:
        """Begins one, unless another one is under way; where the engine is stepped."""
        if self._busy:
            done(CapacityError("other weights are being loaded; try again later"))
            return
        self._busy = True
        self._thread = threading.Thread(target=self._run, args=(name, done), daemon=True)
        self._thread.start()

    def at_exit(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _run(self, name: str, done: Done) -> None:
        error: BaseException | None = None
        try:
            self._update(name)
        except Exception as refused:
            error = refused
        self._call(lambda: self._end(error, done))

    def _end(self, error: BaseException | None, done: Done) -> None:
        self._busy = False
        if error is not None and not isinstance(error, SpecDecError):
            logger.error("the drafter could not be updated", exc_info=error)
        done(error)
