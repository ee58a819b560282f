"""Tools: what requests say of them, the grammar of forced calls, and how models write calls, a file a format."""
