"""`python -m orbax_t5x`: the command line."""

from orbax_t5x.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
