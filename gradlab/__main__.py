"""`python -m gradlab`."""

from gradlab.cli.main import main

main()
