"""`python -m loraplex`.

Python puts the current folder first on the import path, so that a file named like a library would
be run. The folder is removed before anything else is imported.
"""

import sys

if not sys.flags.safe_path:
    del sys.path[0]

from loraplex.cli import main

if __name__ == "__main__":
    main()
