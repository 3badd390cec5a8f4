"""Reports: pages of answers, tables and drawings."""
