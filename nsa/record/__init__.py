"""Records a run: events, statistics, memory and tracing."""
