"""`gradlab train`: the command, and the reference trainer that it starts."""
