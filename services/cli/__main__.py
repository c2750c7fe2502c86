"""`python -m services.cli`: the same as the `pagewire` command."""

from services.cli.main import app

if __name__ == "__main__":
    app(prog_name="pagewire")
