"""Ctrl-C and SIGTERM: the loop is told to stop at a step, the same one on all processes."""

import os
import signal
import sys
from types import TracebackType
from typing import Any

from jax.experimental import multihost_utils

from vhajax.errors import INTERRUPTED, PREEMPTED


class StopAsked(Exception):  # noqa: N818 (nothing went wrong)
    """Raised where work is under way that is not worth finishing."""


class Stop:
    """A context in which the first Ctrl-C or SIGTERM is a request; the second Ctrl-C interrupts.

    With several processes a signal to any of them stops all: JAX's preemption service, which takes
    SIGTERM itself, has them agree on a poll to come. So all must poll equally often.

    Attributes:
      status: the exit status for it, once asked; else 0.
    """

    def __init__(self, count: int) -> None:
        self.status = 0
        self._many, self._polls, self._caught = count > 1, 0, 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Stop":
        # JAX's own handler of SIGTERM stands already where there are several processes.
        wanted = (signal.SIGINT,) if self._many else (signal.SIGINT, signal.SIGTERM)
        try:
            for number in wanted:
                self._before[number] = signal.signal(number, self._note)
        except ValueError:  # not the main thread: signals are somebody else's
            pass
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: Any) -> None:
        if self._caught:
            raise KeyboardInterrupt
        self._caught = INTERRUPTED if number == signal.SIGINT else PREEMPTED
        print("Stopping after this step; once more to stop at once.", file=sys.stderr)
        if self._many:
            os.kill(os.getpid(), signal.SIGTERM)

    def asked(self) -> bool:
        """Whether to stop now; True ever after."""
        if not self.status:
            self._polls += 1
            if self._many and multihost_utils.reached_preemption_sync_point(self._polls):
                self.status = self._caught or PREEMPTED
            elif not self._many:
                self.status = self._caught
        return bool(self.status)
