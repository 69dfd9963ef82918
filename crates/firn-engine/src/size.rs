//! How long a file is: what the backing has, or what is pending beyond its end.

use firn_backing::Attr;

/// The length of a file that has pending bytes up to `pending_end`, 0 where it has none. `attr` is of the backing, asked
/// for *after* `pending_end` was read: a drain between the two must not make the file look short.
pub(crate) fn whole_size(attr: &Attr, pending_end: u64) -> u64 {
    attr.size.max(pending_end)
}
