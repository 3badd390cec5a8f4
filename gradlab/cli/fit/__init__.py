"""`gradlab fit`: a command per method."""
