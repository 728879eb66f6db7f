"""Run a process: settings, lifecycle, engine threads, start-up times and vital signs."""
