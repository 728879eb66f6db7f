"""Place the processes of a stack on the GPUs of this machine, and divide the GPUs' memory."""
