//! Reads and writes the fields of a page at fixed offsets. Numbers are little-endian.

/// Copies `bytes` into the page at `offset`.
pub(crate) fn put(page: &mut [u8], offset: usize, bytes: &[u8]) {
    page[offset..offset + bytes.len()].copy_from_slice(bytes);
}

/// Stores a number of 4 bytes at `offset`.
pub(crate) fn put_u32(page: &mut [u8], offset: usize, value: u32) {
    put(page, offset, &value.to_le_bytes());
}

/// Stores a number of 8 bytes at `offset`.
pub(crate) fn put_u64(page: &mut [u8], offset: usize, value: u64) {
    put(page, offset, &value.to_le_bytes());
}

/// Returns the `N` bytes of the page at `offset`.
pub(crate) fn read_array<const N: usize>(page: &[u8], offset: usize) -> [u8; N] {
    page[offset..offset + N].try_into().expect("N bytes")
}

/// Reads a number of 4 bytes at `offset`.
pub(crate) fn read_u32(page: &[u8], offset: usize) -> u32 {
    u32::from_le_bytes(read_array(page, offset))
}

/// Reads a number of 8 bytes at `offset`.
pub(crate) fn read_u64(page: &[u8], offset: usize) -> u64 {
    u64::from_le_bytes(read_array(page, offset))
}
