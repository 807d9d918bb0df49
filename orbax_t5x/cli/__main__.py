"""`python -m orbax_t5x.cli`."""

from orbax_t5x.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
