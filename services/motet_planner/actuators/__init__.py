"""Start and stop instances: one interface, with an implementation for each platform."""
