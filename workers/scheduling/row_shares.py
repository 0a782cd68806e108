"""Who may have a sequence row, and who gives one up.

Rows are short where answers are long: whoever fills all of them makes everybody wait for one of his
to end.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from workers.scheduling.fairness import Account, FairQueue, last_in_turn, with_leeway

if TYPE_CHECKING:
    from workers.scheduling.sequence import Sequence

LEAST_KEPT, MOST_KEPT = 1 / 16, 1 / 8
"""Of the rows, for who has not many more than his share of them."""


class RowShares:
    """Of `num_rows`."""

    def __init__(self, queue: FairQueue, num_rows: int) -> None:
        self._queue = queue
        self._num_rows = num_rows

    def may_begin(self, account: Account, running: Iterable[Sequence], num_free: int) -> bool:
        """The last rows, about one for each other tenant with work, are for those that are nobody's
        guests and have not many more than their share of all, when it is their turn; and for those
        that a guest would have to give one up for, as it has to where none is free."""
        share = self._queue.share(account)
        least, most = (int(part * self._num_rows) for part in (LEAST_KEPT, MOST_KEPT))
        if num_free > min(max(round(1.0 / share) - 1, least), most):
            return True
        limit = with_leeway(min(share, 0.5)) * self._num_rows
        if num_free and account.num_running < limit and not self._queue.is_guest(account):
            return True
        return self.victim(account, running) is not None

    def victim(self, account: Account, running: Iterable[Sequence]) -> Sequence | None:
        """Who gives up its row to one of `account`: the newest of the guest that has most, for its
        share, if it has still no less than the other then. None of a guest's are for guests."""
        if self._queue.is_guest(account):
            return None
        level = (account.num_running + 1) / self._queue.share(account)
        guests = [
            other
            for other in dict.fromkeys(sequence.account for sequence in running)
            if (other.num_running - 1) / self._queue.share(other) >= level
            and self._queue.is_guest(other)
        ]
        if not guests:
            return None
        most = max(guests, key=lambda guest: guest.num_running / self._queue.share(guest))
        return last_in_turn(sequence for sequence in running if sequence.account is most)
