"""How fast companions are built, how large they are, and how much memory that takes."""
