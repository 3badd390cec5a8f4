"""The questions of a report, a file each: its answer in words, its tables and its charts.

1. Will it pay, on these nodes and this link? 2. Which plan, with which settings? 3. What does it cost in accuracy, and
how sure is that? 4. What do the gradients look like?
"""
