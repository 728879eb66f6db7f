"""Keep duplicates of sockets, and of the memory behind them, beyond the death of the process that serves them.

`store` is the process, `client` the side of a gateway, `frames` what they send each other. Standard
library only: this process has to outlive all others, so it imports and computes as little as it can.
"""
