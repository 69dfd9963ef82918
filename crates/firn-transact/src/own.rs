//! Reads and writes Firn's own files, below `.firn/` in the tree of a mount or in a backup ([`firn_hosts::own`]).

pub(crate) use firn_hosts::own::*;
