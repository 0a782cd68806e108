"""`python -m loraplex`."""

from loraplex.cli import main

if __name__ == "__main__":
    main()
