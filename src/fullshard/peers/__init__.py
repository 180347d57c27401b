"""How ranks watch each other: what each does, who is lost, slow or on another path."""
