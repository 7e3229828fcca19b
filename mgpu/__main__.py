"""`python -m mgpu` is the `mgpu` command."""

from mgpu.cli.app import main

if __name__ == "__main__":
    main()
