//! Append, snapshot and replay of metadata records over a byte region.
