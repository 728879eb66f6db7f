"""`motet up` imports what orders need while its own files are there: those of a newer release may not fit."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import asyncio, sys
from motet_cli.supervision.connection import NatsAccess
from motet_cli.supervision.orders import Restart
from motet_cli.supervision.up import Up

assert "motet_cli.supervision.rolling" not in sys.modules, "the start does not need it"

async def started():
    later = asyncio.Event()
    later.set()
    await object.__new__(Up)._import_for_orders(later)

class Replaced:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("motet_"):
            raise ImportError(f"{name} is imported from the files of another release")

class Slots:
    slots = ()

asyncio.run(started())
sys.meta_path.insert(0, Replaced())
from motet_cli.supervision.rolling import Rolling

rolling = Rolling(Slots(), NatsAccess("nats://127.0.0.1:1", "password"), print)
try:
    asyncio.run(rolling.carry_out(Restart(["decode"], 1.0), print))
except Exception as error:
    print(type(error).__name__)
"""


def test_an_order_imports_nothing_of_motet_any_more() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "ConfigError\n"), done.stderr
