"""A probe of whether the containers of a network reach each other on this machine."""

import subprocess

from containers.engine import Docker

NAME = "motet-probe"
PORT = 4222
CONNECT_SECONDS = 20
SERVE = f"""
import socket
server = socket.create_server(("", {PORT}))
while True:
    server.accept()[0].close()
"""
CONNECT = f"""
import socket, sys, time
deadline = time.monotonic() + {CONNECT_SECONDS}
while True:
    try:
        socket.create_connection(("{NAME}", {PORT}), 2).close()
        break
    except OSError as error:
        if time.monotonic() > deadline:
            sys.exit(repr(error))
        time.sleep(0.2)
"""


def separation(docker: Docker, image: str) -> str | None:
    """Return why a container cannot connect to another of its network by its name; None where it can.

    `image` has Python.
    """
    docker.run("network", "create", NAME)
    try:
        docker.run("run", "--detach", "--network", NAME, "--name", NAME, image, *python(SERVE))
        docker.run("run", "--rm", "--network", NAME, image, *python(CONNECT))
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return f"containers of one network cannot reach each other on this machine: {error}"
    finally:
        docker.remove_containers()
    return None


def python(program: str) -> list[str]:
    """Return the command that runs a program."""
    return ["python3", "-c", program]
