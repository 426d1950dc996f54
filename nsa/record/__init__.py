"""Records a run: events, statistics, memory, tracing and the watchdog."""
