"""Tools: what a policy may call, and the reader of the calls that it writes."""
