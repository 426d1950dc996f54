"""When a run saves, and what it does when saving fails.

A save goes on while training does. All ranks learn of its end at the same step, through the step's own message. One
that failed is an incident and is tried again; three in a row end the run.
"""

from collections.abc import Callable

from nsa.checkpoint.save import Saver
from nsa.config import Config
from nsa.errors import CheckpointError
from nsa.parallel.collectives import lost_rank
from nsa.train.resume import snapshot
from nsa.train.state import RunState

TRIES = 3
# Before each tensor of a save in the background. Writing the 522 tensors of a 125M run keeps the interpreter for about
# half a second, which stops the thread that trains: spread over 13 s that is a twentieth of the steps and less.
PAUSE_S = 0.025


class Saving:
    """`before_save` runs on every rank before a snapshot is taken; `incident` reports a kind and a message."""

    def __init__(
        self,
        config: Config,
        state: RunState,
        saver: Saver,
        before_save: Callable[[], None],
        incident: Callable[[str, str], None],
        saved_step: int,
    ):
        self.config, self.state, self.saver = config, state, saver
        self.before_save, self.incident = before_save, incident
        self.saved_step = saved_step  # the newest step that is safe
        self._writing_step = 0
        self._writing_best = False
        self._failures = 0
        self._pending = False
        self._best_pending = False

    def vote(self) -> int:
        """1 when this rank has written its part of the save that is under way."""
        return int(self.saver.written)

    def after_step(self, votes: int, *, is_best: bool) -> None:
        """Takes note of a save that ended on all ranks, and starts one where it is due."""
        if votes == self.state.world.size:
            self._end()
        every, step = self.config.checkpoint.every, self.state.progress.step
        self._best_pending |= is_best
        self._pending |= is_best or bool(every and step % every == 0)
        if is_best:
            self.settle()  # the best is this very step, not one a little later
        if self._pending and not self.saver.busy:  # else at a later step: training does not wait
            background = self.config.checkpoint.background
            self._begin(PAUSE_S if background else 0.0)
            if not background:
                self._end()

    def settle(self) -> None:
        """Waits for a save that is under way."""
        if self.saver.busy:
            self._end()

    def now(self) -> None:
        """Returns when the present step is safe."""
        self.settle()
        while self.saved_step != self.state.progress.step:
            self._begin()
            self._end()

    def _begin(self, pause_s: float = 0.0) -> None:
        self.before_save()
        self.saver.begin(snapshot(self.state, self.config, is_best=self._best_pending), pause_s=pause_s)
        self._writing_step, self._writing_best = self.state.progress.step, self._best_pending
        self._pending = self._best_pending = False

    def _end(self) -> None:
        failure = self.saver.finish()
        if failure is None:
            self.saved_step, self._failures = self._writing_step, 0
            return
        self._failures += 1
        self._pending = True
        lost = lost_rank(failure, self.state.world.rank, self.state.world.size)
        if lost is not None:
            raise lost
        # Tried again with the weights of a later step, which are not the best.
        unmarked = "; it had the best validation loss" if self._writing_best else ""
        self.incident("save_failed", f"step {self._writing_step} could not be saved: {failure}{unmarked}")
        if self._failures == TRIES:
            last = self.saver.last_good or "none of this process"
            raise CheckpointError(
                f"saving failed {TRIES} times in a row, the last time with: {failure}; the last good checkpoint: {last}"
            )
