"""The look of figures, and the drawings that pages and commands share."""
