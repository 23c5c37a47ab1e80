"""`python -m nanosprint`."""

from nanosprint.cli import main

main()
