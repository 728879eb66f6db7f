"""Move bulk bytes out of band: shared memory on one host, TCP between hosts."""
