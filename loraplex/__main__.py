"""`python -m loraplex`.

Python puts the current folder first on the path of imports, where a file of any library's name
would run in its place; it goes before anything else is imported.
"""

import sys

if not sys.flags.safe_path:
    del sys.path[0]

from loraplex.cli import main

if __name__ == "__main__":
    main()
