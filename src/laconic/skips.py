"""Steps that do not count: how many there were, and a word about them in the log."""

import logging

log = logging.getLogger("laconic")


class Skips:
    """Counts them, and says so of the 1st, 2nd, 4th, 8th ... in a row."""

    def __init__(self) -> None:
        self.total = 0
        self._in_a_row = 0

    def add(self, step: int) -> str:
        """One more; returns what is to be said of it."""
        self.total += 1
        self._in_a_row += 1
        text = f"a gradient of step {step} is not finite on some rank; it does not count"
        number = self._in_a_row
        if number & (number - 1) == 0:
            log.warning(text + (f" ({number} times in a row)" if number > 1 else ""))
        return text

    def end(self) -> None:
        """A step counts again."""
        # Who saw few lines of many should know how many there would have been.
        if self._in_a_row > 2:
            log.warning("gradients are finite again after %d steps", self._in_a_row)
        self._in_a_row = 0
