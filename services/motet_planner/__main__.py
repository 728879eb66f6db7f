"""`python -m motet_planner`: run the process that has as many instances as are needed."""

from motet_shared.starts import importing

with importing():
    from motet_shared.actor import run

    from .config import PlannerConfig
    from .service import Planner

if __name__ == "__main__":
    run(Planner, PlannerConfig)
