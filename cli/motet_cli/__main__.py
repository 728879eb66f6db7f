"""Run the `motet` command: `python -m motet_cli`."""

from motet_cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
