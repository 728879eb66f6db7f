"""Run one rank of a group: started by the leader, with the descriptor of its link and its own id."""

import os
import sys

from motet_llm.parallel.worker import run_rank

if __name__ == "__main__":
    # Without waiting for threads of a group whose ranks are gone.
    os._exit(run_rank(int(sys.argv[1]), int(sys.argv[2])))
