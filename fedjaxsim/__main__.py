"""`python -m fedjaxsim`."""

import sys

from fedjaxsim.cli import main

if __name__ == "__main__":
    sys.exit(main())
