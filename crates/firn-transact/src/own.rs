//! Firn's own files in a backing or a backup: the functions of [`firn_hosts::own`].

pub(crate) use firn_hosts::own::*;
