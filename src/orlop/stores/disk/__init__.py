"""The slab: chunks in cells of a few large files, on a local disk; docs/internals/disk-format.md has its bytes."""
