//! The framing of the journal, the log of metadata records in an arena: shared memory with the bytes of files that are
//! not in the backing directory yet.
//!
//! The journal has two halves, of which one is active. Each half has a header, and each record in it is a *frame*.
//!
//! ```text
//! half header   magic u64, generation u64, reserved u32, CRC32C u32        24 bytes
//! frame         len u32, CRC32C u32, sequence u64, payload, zeros to 8     16 + len
//! ```
//!
//! The generation of a half is raised with each use of the half. The checksum of a frame covers its length, its
//! sequence, the generation of the half, and the payload. The sequences in a half begin with 0 and have no gaps. So a
//! frame that is left over from an earlier use of the half is never valid.

/// Length of the header of a half in bytes.
pub const HALF_HEADER_BYTES: usize = 24;
/// Number of bytes of a frame before its payload.
pub const FRAME_HEADER_BYTES: usize = 16;
const HALF_MAGIC: u64 = u64::from_le_bytes(*b"FIRNJRNL");

/// Encodes the header of a half with this generation.
pub fn encode_half_header(generation: u64) -> [u8; HALF_HEADER_BYTES] {
    let mut header = [0u8; HALF_HEADER_BYTES];
    header[0..8].copy_from_slice(&HALF_MAGIC.to_le_bytes());
    header[8..16].copy_from_slice(&generation.to_le_bytes());
    let checksum = crc32c::crc32c(&header[..20]);
    header[20..24].copy_from_slice(&checksum.to_le_bytes());
    header
}

/// Decodes the header of a half and returns its generation. Returns `None` if the header is not valid.
pub fn decode_half_header(bytes: &[u8]) -> Option<u64> {
    let header: &[u8; HALF_HEADER_BYTES] = bytes.get(..HALF_HEADER_BYTES)?.try_into().ok()?;
    let checksum = u32::from_le_bytes(header[20..24].try_into().ok()?);
    if header[0..8] != HALF_MAGIC.to_le_bytes() || checksum != crc32c::crc32c(&header[..20]) {
        return None;
    }
    let generation = header[8..16].try_into().ok()?;
    Some(u64::from_le_bytes(generation))
}

/// Returns how many bytes the frame of a payload of `len` bytes takes.
pub fn frame_bytes(len: usize) -> usize {
    (FRAME_HEADER_BYTES + len).next_multiple_of(8)
}

/// Computes the checksum of a frame.
fn frame_checksum(generation: u64, sequence: u64, payload: &[u8]) -> u32 {
    let mut head = [0u8; 20];
    head[0..4].copy_from_slice(&(payload.len() as u32).to_le_bytes());
    head[4..12].copy_from_slice(&sequence.to_le_bytes());
    head[12..20].copy_from_slice(&generation.to_le_bytes());
    crc32c::crc32c_append(crc32c::crc32c(&head), payload)
}

/// Appends the frame of `payload` to `out`.
pub fn encode_frame(generation: u64, sequence: u64, payload: &[u8], out: &mut Vec<u8>) {
    let start = out.len();
    out.extend_from_slice(&(payload.len() as u32).to_le_bytes());
    out.extend_from_slice(&frame_checksum(generation, sequence, payload).to_le_bytes());
    out.extend_from_slice(&sequence.to_le_bytes());
    out.extend_from_slice(payload);
    out.resize(start + frame_bytes(payload.len()), 0);
}

/// Returns the payload of the frame at the start of `bytes`, if the frame is valid and has this `sequence`.
pub fn decode_frame(generation: u64, sequence: u64, bytes: &[u8]) -> Option<&[u8]> {
    let (frame_sequence, payload) = peek_frame(generation, bytes)?;
    (frame_sequence == sequence).then_some(payload)
}

/// Returns the sequence and the payload of the frame at the start of `bytes`, if the frame is valid.
pub fn peek_frame(generation: u64, bytes: &[u8]) -> Option<(u64, &[u8])> {
    let header = bytes.get(..FRAME_HEADER_BYTES)?;
    let len = u32::from_le_bytes(header[0..4].try_into().ok()?) as usize;
    let checksum = u32::from_le_bytes(header[4..8].try_into().ok()?);
    let sequence = u64::from_le_bytes(header[8..16].try_into().ok()?);
    let payload = bytes.get(FRAME_HEADER_BYTES..FRAME_HEADER_BYTES.checked_add(len)?)?;
    if len == 0 || checksum != frame_checksum(generation, sequence, payload) {
        return None;
    }
    Some((sequence, payload))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_passes_only_in_its_place() {
        let mut bytes = Vec::new();
        encode_frame(3, 5, b"hello", &mut bytes);
        assert_eq!(bytes.len(), frame_bytes(5));
        assert_eq!(decode_frame(3, 5, &bytes), Some(&b"hello"[..]));
        assert_eq!(decode_frame(3, 6, &bytes), None);
        assert_eq!(decode_frame(4, 5, &bytes), None);
        for cut in 0..FRAME_HEADER_BYTES + 5 {
            assert_eq!(decode_frame(3, 5, &bytes[..cut]), None);
        }
    }

    #[test]
    fn a_half_header_with_a_flipped_bit_is_none() {
        let good = encode_half_header(12);
        assert_eq!(decode_half_header(&good), Some(12));
        for bit in 0..good.len() * 8 {
            let mut bad = good;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(decode_half_header(&bad), None);
        }
    }
}
