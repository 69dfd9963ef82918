//! CRC-32 (the one of zip and png), a table a byte position: eight bytes a turn.

/// Reflected polynomial 0x04C11DB7.
const POLYNOMIAL: u32 = 0xEDB8_8320;
const TABLES: [[u32; 256]; 8] = tables();

const fn tables() -> [[u32; 256]; 8] {
    let mut tables = [[0; 256]; 8];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 1 == 1 {
                crc >> 1 ^ POLYNOMIAL
            } else {
                crc >> 1
            };
            bit += 1;
        }
        tables[0][byte] = crc;
        byte += 1;
    }
    let mut position = 1;
    while position < 8 {
        let mut byte = 0;
        while byte < 256 {
            let before = tables[position - 1][byte];
            tables[position][byte] = before >> 8 ^ tables[0][(before & 0xFF) as usize];
            byte += 1;
        }
        position += 1;
    }
    tables
}

/// A checksum in the making.
#[derive(Clone, Copy, Debug)]
pub struct Crc32(u32);

impl Crc32 {
    /// Of nothing yet.
    pub fn new() -> Crc32 {
        Crc32(!0)
    }

    /// Takes more bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        let mut words = bytes.chunks_exact(8);
        for word in &mut words {
            let value =
                u64::from_le_bytes(word.try_into().expect("eight bytes")) ^ u64::from(self.0);
            self.0 = (0..8).fold(0, |crc, position| {
                crc ^ TABLES[7 - position][(value >> (8 * position)) as usize & 0xFF]
            });
        }
        for byte in words.remainder() {
            self.0 = self.0 >> 8 ^ TABLES[0][((self.0 ^ u32::from(*byte)) & 0xFF) as usize];
        }
    }

    /// The checksum of all bytes taken.
    pub fn value(self) -> u32 {
        !self.0
    }
}

/// The checksum of `bytes`.
pub fn crc32(bytes: &[u8]) -> u32 {
    let mut crc = Crc32::new();
    crc.update(bytes);
    crc.value()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_check_value_of_the_standard_comes_out() {
        assert_eq!(crc32(b"123456789"), 0xCBF4_3926);
    }

    #[test]
    fn a_cut_anywhere_gives_the_same_sum() {
        let bytes: Vec<u8> = (0..100).collect();
        for cut in 0..=bytes.len() {
            let mut crc = Crc32::new();
            crc.update(&bytes[..cut]);
            crc.update(&bytes[cut..]);
            assert_eq!(crc.value(), crc32(&bytes), "cut at {cut}");
        }
    }
}
