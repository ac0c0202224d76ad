"""What commands leave behind: whole files, tables, figures, and the commit they came from."""
