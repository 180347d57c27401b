"""Checks that programs keep to what a correct step assumes: errors, warnings, slower ways."""
