"""Build, load, call and replay native kernels; check arguments; choose devices and types."""
