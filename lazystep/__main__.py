"""`python -m lazystep` is `lazystep`."""

from .cli import main

if __name__ == "__main__":
    main(prog_name="lazystep")
