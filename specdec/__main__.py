"""`python -m specdec` is `specdec`."""

from specdec.cli.main import command

if __name__ == "__main__":
    command()
