"""The top floor: commands, and the reference trainer. The only code that may import all the other parts."""
