"""`motet up`: start, watch, restart and scale the processes of a stack."""
