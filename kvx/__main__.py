"""The command `kvx`, and `python -m kvx`."""

from kvx.cli import starting


def main() -> None:
    starting.begin()
    from kvx.cli.main import main as run

    starting.end()
    run()


if __name__ == "__main__":
    main()
