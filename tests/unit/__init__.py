"""Single-process tests, by the rooms of the package."""
