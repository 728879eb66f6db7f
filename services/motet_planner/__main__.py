"""Run `python -m motet_planner`, the process that scales services to their load."""

from motet_shared.process.starts import importing

with importing():
    from motet_shared.process.actor import run

    from .config import PlannerConfig
    from .service import Planner

if __name__ == "__main__":
    run(Planner, PlannerConfig)
