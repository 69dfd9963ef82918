//! The mapped region: create, attach, lease, append, seal, recover.
