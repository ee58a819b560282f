"""What the parsers of thoughts and of calls share: text that comes in pieces, and what it says."""
