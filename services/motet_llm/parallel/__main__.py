"""Run one rank of a group: started by the group's leader, with the descriptor of its link."""

import logging
import os
import signal
import sys

from motet_llm.parallel.worker import serve
from motet_shared.process.actor import die_with_parent

if __name__ == "__main__":
    die_with_parent()  # even if it is stopped
    # The leader drains on these signals, and needs its ranks until it is done.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING)
    status = serve(int(sys.argv[1]))
    sys.stderr.flush()
    os._exit(status)  # without waiting for threads of a group whose ranks are gone
