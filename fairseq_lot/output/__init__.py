"""Output of the commands: complete files, tables, figures, and the commit that made them."""
