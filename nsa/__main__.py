"""`python -m nsa` is the `nsa` command."""

from nsa.cli.start import main

main()
