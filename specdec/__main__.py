"""`python -m specdec` is `specdec`."""

from specdec.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
