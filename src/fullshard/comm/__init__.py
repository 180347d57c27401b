"""Communication: ways in which ranks exchange bytes, behind one small interface."""
