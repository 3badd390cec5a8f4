"""Reports of estimates."""
