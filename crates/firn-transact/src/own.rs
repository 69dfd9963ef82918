//! What is Firn's own in a backing or a backup: the functions of [`firn_rendezvous::own`].

pub(crate) use firn_rendezvous::own::*;
