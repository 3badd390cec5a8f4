"""`gradlab watch`: a run or a recording that is under way, in a terminal."""
