"""Run a part of `make extended` and write its result to tests/extended/results/PART.json.

scripts/extended.py PART [arguments for pytest]

MOTET_EXTENDED_FRESH=1   repeat steps that passed at this commit
MOTET_EYES_MINUTES=60    length of the session of PART=eyes
MOTET_SOAK_MINUTES=60    length of the traffic of PART=soak
MOTET_OLD_RELEASE=TAG    what PART=upgrade upgrades from: a tag or commit

A part is a list of steps. Each step that passes is recorded at once, so that an interrupted run
continues after it. A result has the date, the processor, the commit, and each step's seconds and
end of output; it is to be committed.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_parts import Step, environment, gpu_steps, tables, versions

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "tests" / "extended" / "results"
LLM_FOLDERS = ("engine", "models", "parallel")  # each a step of `families`
UNIT_FOLDERS = ("motet_llm", "motet_tts", "motet_asr", "motet_diffusion", "motet_gateway")
GRAPHS = "tests/kernels/gpu/services/test_gpu_graphs.py"
TAIL = 20_000  # characters of a step's output in its result


def pytest_step(name: str, seconds: int, *argv: str, **env: str) -> Step:
    """Return a step that runs pytest."""
    return Step(name=name, argv=("-m", "pytest", "-q", *argv), seconds=seconds, env=env)


def storm(seed: int) -> Step:
    """Return a step of ten minutes of mixed traffic while processes fail."""
    path = os.pathsep.join(str(ROOT / folder) for folder in ("tests", "models"))
    argv = ("-m", "chaos.storm.storm", "--seconds", "600", "--seed", str(seed))
    return Step(name=f"storm of seed {seed}", argv=argv, seconds=780, env={"PYTHONPATH": path})


def lasting(name: str, title: str, *argv: str) -> Step:
    """Return a step of a benchmark of sessions or traffic that last an hour; of less with MOTET_NAME_MINUTES."""
    minutes = os.environ.get(f"MOTET_{name.upper()}_MINUTES", "60")
    options = ("benchmarks/run.py", name, *argv, "--minutes", minutes, "--check")
    seconds = int(60 * float(minutes)) + 600
    return Step(name=f"{minutes} minutes of {title}", argv=options, seconds=seconds)


def marked(part: str, seconds: int) -> Step:
    """Return a step that runs the tests marked `extended(part)`."""
    return pytest_step(f"tests of {part}", seconds, f"--tier=extended-{part}")


def moves(number: int, of: int) -> Step:
    """Return a step of a slice of the requests that move, and of those that leave."""
    name = f"moves, slice {number} of {of}"
    argv = ("tests/chaos/moves", "--tier=extended-storm")
    return pytest_step(name, 440, *argv, MOTET_MOVES=f"{number}/{of}")


def families(number: int, of: int) -> Step:
    """Return a step of a slice of the families that groups of ranks compute."""
    name = f"families, slice {number} of {of}"
    argv = ("tests/unit/motet_llm/parallel/test_parallel_families.py", "--tier=extended-groups")
    return pytest_step(name, 360, *argv, MOTET_GROUPS=f"{number}/{of}")


def of_families(name: str, *files: str) -> Step:
    """Return a step that runs the tests marked `extended("families")` of files and folders."""
    return pytest_step(f"families and settings: {name}", 480, "--tier=extended-families", *files)


def without(folder: str, *others: str) -> tuple[str, ...]:
    """Return arguments that run the tests of a folder of tests/ but for those of some folders in it."""
    path = str(Path("tests") / folder)
    return (path, *(f"--ignore={path}/{other}" for other in others))


def of_groups(name: str, seconds: int, *files: str) -> Step:
    """Return a step that runs all cases of test files of groups of ranks, those of other tiers too."""
    return pytest_step(name, seconds, "--tier=all", *files)


PARTS: dict[str, list[Step]] = {
    "peers": [
        marked("peers", 800),
        *(
            Step(
                name=f"benchmark {name} --quick",
                argv=("benchmarks/run.py", name, "--quick"),
                seconds=700,
            )
            for name in ("llm", "engine_wire", "images", "voice")
        ),
    ],
    "conformance": [
        marked("conformance", 1740),
        Step(name="docs/conformance.md", argv=("scripts/list_conformance.py",), seconds=60),
        pytest_step(
            "long schedules of all families",
            1800,
            "tests/unit/motet_llm/engine/test_llm_exactness.py",
            "--tier=all",
            "-k",
            "at_length",
            MOTET_SCHEDULES="5",
        ),
    ],
    "storm": [
        *map(storm, (1, 2, 3)),
        *(moves(number, 8) for number in range(1, 9)),
        pytest_step("tests of storm", 1200, "--tier=extended-storm", "--ignore=tests/chaos/moves"),
    ],
    "soak": [
        marked("soak", 300),
        lasting("soak", "half load"),
        pytest_step(
            "fuzzed frames", 5400, "tests/fuzz/test_frames.py", MOTET_FUZZ_FRAMES="1000000"
        ),
        pytest_step("fuzzed requests", 800, "tests/fuzz/test_http.py", MOTET_FUZZ_EXAMPLES="100"),
        pytest_step(
            "fuzzed sessions", 500, "tests/fuzz/test_realtime.py", MOTET_FUZZ_SESSIONS="300"
        ),
    ],
    "groups": [
        *(families(number, 16) for number in range(1, 17)),
        of_groups(
            "what requests ask for, hand-over, fixed trees",
            440,
            *(
                f"tests/unit/motet_llm/parallel/test_parallel_{name}.py"
                for name in ("engine", "features", "handover", "deterministic")
            ),
        ),
        of_groups(
            "deadlines, failures, smaller groups",
            440,
            *(
                f"tests/unit/motet_llm/parallel/test_parallel_{name}.py"
                for name in ("deadlines", "group", "shares", "smaller")
            ),
        ),
        of_groups(
            "ranks that are killed and stopped",
            480,
            "tests/chaos/test_ranks.py",
            "tests/chaos/test_ranks_return.py",
        ),
    ],
    "families": [
        *(
            of_families(f"language models, {folder}", f"tests/unit/motet_llm/{folder}")
            for folder in LLM_FOLDERS
        ),
        of_families("language models, the rest", *without("unit/motet_llm", *LLM_FOLDERS)),
        of_families("speech", "tests/unit/motet_tts"),
        of_families("transcription", "tests/unit/motet_asr"),
        of_families("pictures and videos", "tests/unit/motet_diffusion"),
        of_families("the gateway", "tests/unit/motet_gateway"),
        of_families("other units", *without("unit", *UNIT_FOLDERS)),
        of_families("stacks", *without("", "unit", "kernels")),
        of_families("graphs of steps, interpreted", GRAPHS),
        of_families("kernels, the rest", "tests/kernels", f"--ignore={GRAPHS}"),
    ],
    "eyes": [
        pytest_step("sessions that see move", 800, "tests/chaos/test_eyes.py", "--tier=all"),
        lasting("eyes", "frames", "--only", "session"),
    ],
    "upgrade": [marked("upgrade", 1600)],
    "gpu": gpu_steps(),
}


def git(*argv: str) -> str:
    """Return what a git command prints; "" for a copy of the files without a repository."""
    try:
        done = subprocess.run(["git", *argv], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def processor() -> str:
    """Return the model name of the processor and its number of threads."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else 'unknown'}, {os.cpu_count()} threads"


def commit() -> str:
    """Return the checked-out commit, followed by `+` if tracked files other than results differ."""
    changed = git(
        "status", "--porcelain", "--untracked-files=no", "--", ".", f":!{RESULTS.relative_to(ROOT)}"
    )
    return (git("rev-parse", "HEAD") or "unknown") + ("+" if changed else "")


def run_step(step: Step, extra: Sequence[str]) -> dict[str, Any]:
    """Run a step and return its result: `passed`, `seconds`, `output`, `skipped` with its reason."""
    if missing := step.missing():
        reason = f"skipped: {', '.join(missing)} not installed"
        return {"name": step.name, "passed": False, "seconds": 0.0, "output": "", "skipped": reason}
    argv = [sys.executable, *step.argv, *(extra if "pytest" in step.argv else ())]
    started, env = time.monotonic(), {**os.environ, **environment(), **step.env}
    lines: list[str] = []
    with subprocess.Popen(
        ["timeout", "--kill-after=30", str(step.seconds), *argv],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    # pytest exits with 5 if it selects no test: the part has none of its own.
    passed = process.returncode == 0 or (process.returncode == 5 and "pytest" in step.argv)
    seconds = round(time.monotonic() - started, 1)
    return {
        "name": step.name,
        "passed": passed,
        "seconds": seconds,
        "output": "".join(lines)[-TAIL:],
    }


def passed_steps(path: Path, checked_out: str) -> list[dict[str, Any]]:
    """Return the steps that passed at this commit; none if the working tree has changes."""
    if (
        not path.exists()
        or checked_out.endswith("+")
        or os.environ.get("MOTET_EXTENDED_FRESH") == "1"
    ):
        return []
    document = json.loads(path.read_text(encoding="utf-8"))
    return (
        [step for step in document["steps"] if step["passed"]]
        if document["commit"] == checked_out
        else []
    )


def run_part(
    name: str, steps: Sequence[Step], extra: Sequence[str] = (), results: Path = RESULTS
) -> bool:
    """Run the steps of a part that have not passed yet; return True if all have.

    Results go to `results`/NAME.json.
    """
    results.mkdir(parents=True, exist_ok=True)
    path, checked_out = results / f"{name}.json", commit()
    done = passed_steps(path, checked_out)
    for step in steps:
        if step.name in {one["name"] for one in done}:
            print(f"extended: {step.name} has already passed at {checked_out[:12]}")
            continue
        print(f"extended: {step.name}", flush=True)
        done.append(run_step(step, extra))
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        document: dict[str, Any] = {
            "part": name,
            "date": date,
            "processor": processor(),
            "commit": checked_out,
            "steps": done,
        }
        if name == "gpu":
            document["versions"] = versions()
            (results / "gpu.md").write_text(tables(document), encoding="utf-8")
        path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for one in done:
        result = one.get("skipped") or ("passed" if one["passed"] else "FAILED")
        print(f"extended: {result} {one['name']} ({one['seconds']:g} s)")
    return all(one["passed"] or "skipped" in one for one in done)


def main(argv: Sequence[str]) -> int:
    """Run as a script: exit status 0 if every step passed, 2 for a wrong part."""
    if not argv or argv[0] not in PARTS:
        print(
            f"extended: PART={argv[0] if argv else ''!r}: give one of {', '.join(PARTS)}",
            file=sys.stderr,
        )
        return 2
    return 0 if run_part(argv[0], PARTS[argv[0]], argv[1:]) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
