"""Start, supervise, restart and scale the processes of a stack: `motet up`."""
