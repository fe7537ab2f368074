"""The formats on the wire: parts to bytes and back (described in docs/wire.md)."""
