"""Install and remove a systemd unit that runs a stack: `motet install-service`, `uninstall-service`."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path

from motet_cli.main import up_arguments
from motet_shared.errors import ConfigError, MotetError

_SYSTEM = Path("/etc/systemd/system")
_NAME = re.compile(r"[A-Za-z0-9_.@-]+")
_STOP_SECONDS = 120  # more than the longest drain of `motet down`
_UNIT = """\
# Written by `motet install-service`; `motet uninstall-service` removes it.
[Unit]
Description=Motet on port {port}
{network}
[Service]
Type=notify
NotifyAccess=main
WorkingDirectory={folder}
ExecStart={python} -m motet_cli up --survive{flags}
# The services go on: a new supervisor of the same process id adopts them, and replaces one by one
# those whose code or settings have changed.
ExecReload=/bin/kill -USR1 $MAINPID
ExecStop={python} -m motet_cli down --url {url}
# systemd ends and restarts the supervisor only. The services end with `motet down`, or by
# themselves if no supervisor comes back.
KillMode=process
Restart=always
RestartSec=1
RestartPreventExitStatus=2 78
TimeoutStartSec=infinity
TimeoutStopSec={stop}
# A service that the kernel kills for memory is restarted by the supervisor.
OOMPolicy=continue
{account}UMask=0077
NoNewPrivileges=yes
{variables}
[Install]
WantedBy={target}
"""
_NETWORK = """\
Wants=network-online.target
After=network-online.target
"""
# systemd shows the variables of a unit to every user.
_SECRETS = ("MOTET_API_KEY", "MOTET_ENGINE_KEY", "MOTET_ICE_CREDENTIAL", "MOTET_NATS_PASSWORD")
_ACCOUNT = """\
User={user}
RuntimeDirectory={name}
RuntimeDirectoryMode=0700
RuntimeDirectoryPreserve=yes
Environment=XDG_RUNTIME_DIR=/run/{name}
"""


def run(args: Namespace) -> int:
    """Write the unit, print it, or remove it. Raises ConfigError or MotetError."""
    if not _NAME.fullmatch(args.name):
        raise ConfigError(
            f"--name: {args.name!r} is no name of a unit; use letters, digits, '-' and '_'",
            param="--name",
        )
    path = _folder(args.user) / f"{args.name}.service"
    if args.command == "uninstall-service":
        return _uninstall(path, args.user)
    text = unit(args.flags, name=args.name, user=args.user)
    if args.print:
        print(text, end="")
        return 0
    _verify(text, path.name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise MotetError(
            f"cannot write {path}: {error.strerror}; run it as root, or give --user"
        ) from None
    control = _control(args.user)
    print(f"wrote {path}; start it now and at each boot with:")
    print(f"  {control} daemon-reload && {control} enable --now {args.name}")
    if args.user:
        print("  loginctl enable-linger   # it then runs while you are not logged in, too")
    return 0


def unit(flags: list[str], *, name: str, user: bool) -> str:
    """Return the unit of a stack with these flags of `motet up`, in the current folder.

    MOTET_* variables of the environment are written into it. Raises ConfigError for wrong flags, or
    if one of the variables is a secret.
    """
    given = up_arguments(flags)
    if not given.port:
        raise ConfigError("--port: 0 is no port of a service; give another one", param="--port")
    scheme = "https" if given.tls_cert else "http"
    variables = {key: value for key, value in os.environ.items() if key.startswith("MOTET_")}
    for secret in variables.keys() & set(_SECRETS):
        raise ConfigError(
            f"{secret}: every user may read the variables of a unit; set {secret}_FILE to a file with it",
            param=secret,
        )
    owner = os.environ.get("SUDO_USER") or pwd.getpwuid(os.getuid()).pw_name
    return _UNIT.format(
        port=given.port,
        network="" if user else _NETWORK,
        folder=_escaped(str(Path.cwd())),
        python=_quoted(sys.executable),
        flags="".join(f" {_quoted(flag)}" for flag in flags),
        url=f"{scheme}://127.0.0.1:{given.port}",
        stop=_STOP_SECONDS,
        account="" if user else _ACCOUNT.format(user=owner, name=name),
        variables="".join(
            f"Environment={_quoted(f'{key}={value}')}\n" for key, value in sorted(variables.items())
        ),
        target="default.target" if user else "multi-user.target",
    )


def _escaped(text: str) -> str:
    """Return a text in which systemd finds no specifier."""
    return text.replace("%", "%%")


def _quoted(text: str) -> str:
    """Return a word that systemd takes as it is. Raises ConfigError for a line break."""
    if "\n" in text:
        raise ConfigError(f"FLAG: {text!r} has a line break, which a unit cannot have")
    if re.fullmatch(r"[A-Za-z0-9_./:=,@+-]+", text):
        return text
    plain = _escaped(text).replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")
    return f'"{plain}"'


def _folder(user: bool) -> Path:
    """Return the folder of the units of this user, or of the system."""
    if not user:
        return _SYSTEM
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(base) / "systemd" / "user"


def _control(user: bool) -> str:
    return "systemctl --user" if user else "systemctl"


def _verify(text: str, name: str) -> None:
    """Have systemd check the unit, where it is installed. Raises MotetError with what it says."""
    program = shutil.which("systemd-analyze")
    if program is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_text(text)
        done = subprocess.run(
            [program, "verify", "--man=no", str(path)], capture_output=True, text=True
        )
    if done.returncode:
        raise MotetError(f"systemd-analyze verify refuses the unit: {done.stderr.strip()}")


def _uninstall(path: Path, user: bool) -> int:
    """Stop a unit and remove it."""
    if not path.is_file():
        raise ConfigError(f"--name: there is no {path}; see `{_control(user)}`", param="--name")
    program = shutil.which("systemctl")
    if program is not None:
        scope = ["--user"] if user else []
        done = subprocess.run(
            [program, *scope, "disable", "--now", path.name], capture_output=True, text=True
        )
        if done.returncode:
            print(f"{_control(user)} disable --now: {done.stderr.strip()}", file=sys.stderr)
    try:
        path.unlink()
    except OSError as error:
        raise MotetError(f"cannot remove {path}: {error.strerror}; run it as root") from None
    print(f"removed {path}")
    return 0
