"""`make bench`: every benchmark in turn. Arguments go to the plumbing benchmark, the only one so far."""

from __future__ import annotations

import plumbing

if __name__ == "__main__":
    plumbing.main()
