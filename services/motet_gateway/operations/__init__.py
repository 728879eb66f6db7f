"""Report the state of the stack to operators: health, metrics, recent replies, heartbeats."""
