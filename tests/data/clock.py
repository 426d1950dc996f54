"""A clock for tests: its time passes in pauses alone."""


class Clock:
    """Call it for the time; `pause` stands in for waiting for an event or a future. `at` schedules calls."""

    def __init__(self):
        self.now, self.pauses, self._scheduled = 0.0, [], []

    def __call__(self):
        return self.now

    def at(self, time, call):
        self._scheduled.append((time, call))

    def pause(self, _awaited, seconds):
        self.pauses.append(seconds)
        self.now = round(self.now + seconds, 6)  # tenths add up to seconds
        due = [entry for entry in self._scheduled if entry[0] <= self.now]
        for entry in due:
            self._scheduled.remove(entry)
            entry[1]()
