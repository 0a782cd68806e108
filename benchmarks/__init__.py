"""Speed, measured from outside: nothing here is a test."""
