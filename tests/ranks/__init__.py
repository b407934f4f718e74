"""Tests on several ranks, by the rooms of the package; and tests that need what ranks have saved."""
