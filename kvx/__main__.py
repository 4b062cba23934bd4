"""python -m kvx: the same as `kvx`."""

from kvx.cli.main import main

if __name__ == "__main__":
    main()
