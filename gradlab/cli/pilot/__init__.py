"""`gradlab pilot`: plans tried on the user's own training command."""
