"""`python -m motet_planner`: run the process that has as many instances as are needed."""

from motet_planner.config import PlannerConfig
from motet_planner.service import Planner
from motet_shared.actor import run

if __name__ == "__main__":
    run(Planner, PlannerConfig)
