"""Draw pictures as jobs: they are kept, and survive the restart of every process.

    motet up --store jobs
    python examples/image_jobs.py --folder pictures "two red circles" "a green star"

A job has an id that is chosen here, from the prompt: submitted again, after a crash say, it is the
same job and is not drawn twice.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from pathlib import Path
from typing import Any

import httpx


def submit(http: httpx.Client, prompt: str, seed: int) -> dict[str, Any]:
    """Submit a job; a job of the same prompt and seed is answered with its state."""
    name = hashlib.sha256(f"{prompt} {seed}".encode()).hexdigest()[:24]
    body = {"id": f"example-{name}", "prompt": prompt, "seed": seed}
    return _checked(http.post("/v1/images/jobs", json=body))


def wait(http: httpx.Client, job: dict[str, Any]) -> dict[str, Any]:
    """Return the job once it has ended; print how it gets on."""
    while job["status"] not in ("done", "failed", "cancelled"):
        ahead = "" if job["position"] is None else f", {job['position']} before it"
        print(f"{job['id']}: {job['status']}{ahead}, step {job['step']} of {job['steps']}")
        time.sleep(0.5)
        job = _checked(http.get(f"/v1/images/jobs/{job['id']}"))
    return job


def save(http: httpx.Client, job: dict[str, Any], folder: Path) -> list[Path]:
    """Fetch the pictures of a job that is done. Raises RuntimeError for one that is not."""
    if job["status"] != "done":
        raise RuntimeError(f"{job['id']} is {job['status']}: {job['error']}")
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for picture in job["data"]:
        path = folder / picture["url"].rpartition("/")[2]
        path.write_bytes(http.get(picture["url"]).raise_for_status().content)
        paths.append(path)
    return paths


def _checked(reply: httpx.Response) -> dict[str, Any]:
    if reply.status_code >= 400:
        raise RuntimeError(reply.json()["error"]["message"])
    answer: dict[str, Any] = reply.json()
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw pictures as jobs.")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="(default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=Path("pictures"), help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("prompts", metavar="TEXT", nargs="+", help="what to draw")
    args = parser.parse_args()
    with httpx.Client(base_url=args.url, timeout=30) as http:
        jobs = [submit(http, prompt, args.seed) for prompt in args.prompts]
        for job in jobs:
            for path in save(http, wait(http, job), args.folder):
                print(f"{job['id']}: {path}")


if __name__ == "__main__":
    main()
