"""Tasks in the format of Harbor."""
