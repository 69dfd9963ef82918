//! Length of a file, from the file in the backing (the directory that the mount serves) and the pending bytes (in
//! memory only) beyond its end.

use firn_backing::Attr;

/// Returns the length of a file with pending bytes up to `pending_end`, which is 0 if it has none. The caller reads
/// `attr` from the backing *after* `pending_end`. In the other order a drain between the two could make the file look
/// too short.
pub(crate) fn whole_size(attr: &Attr, pending_end: u64) -> u64 {
    attr.size.max(pending_end)
}
