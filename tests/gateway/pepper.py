"""What the keys of these tests are hashed with; alone, so that processes which need only this start
quickly."""

PEPPER = b"pepper"
