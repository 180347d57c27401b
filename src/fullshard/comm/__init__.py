"""How ranks exchange bytes, behind one small interface."""
