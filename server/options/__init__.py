"""What a server is told when it starts, on the command line and in a file: the text, and what it means."""
