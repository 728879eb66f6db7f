"""What starts and ends instances: one interface, and a way to it for each place where services run."""
