"""Add machines to a running stack, and take them out: `motet invite`, `motet join`, `motet leave`."""
