"""`python -m gradlab`."""

from gradlab.start import main

main()
