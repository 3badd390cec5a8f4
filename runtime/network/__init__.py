"""Codecs' requests on a process group."""
