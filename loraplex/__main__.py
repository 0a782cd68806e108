"""Runs the command line: `python -m loraplex`.

Python puts the current folder first on the import path, so a file there with the name of a library
would be imported instead of the library. The folder is removed before anything else is imported.
"""

import sys

if not sys.flags.safe_path:
    del sys.path[0]

from loraplex.cli import main

if __name__ == "__main__":
    main()
