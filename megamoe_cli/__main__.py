"""``python -m megamoe_cli``: the command line from a checkout, nothing installed."""

from megamoe_cli.cli.main import run

if __name__ == "__main__":
    run()
