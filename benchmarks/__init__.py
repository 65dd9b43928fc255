"""Commands that measure what the documentation claims about speed and memory, beside other tools."""
