"""python -m kvx.bench write|gather|call: the same as `kvx bench`."""

from kvx.cli.bench import app

if __name__ == "__main__":
    app()
