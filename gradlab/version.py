"""The one place that holds the version."""

#: The version of the installed package.
VERSION = "0.1.0"
