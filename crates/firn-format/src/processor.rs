//! The instructions that this processor has, detected once.
//!
//! The standard library detects them with a dozen CPUID instructions. In a virtual machine each of these takes 4 to 7
//! µs, because the host handles it. That would delay the first write of a process by direct access. A caller that
//! already has the result can store it beforehand ([`store_processor`]).

use std::sync::atomic::{AtomicU8, Ordering};

/// Optional instructions that Firn uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Processor {
    /// CRC32C of a word (SSE4.2).
    pub has_crc32c: bool,
    /// Stores of 32 bytes that bypass the caches (AVX).
    pub has_avx: bool,
    /// Stores of 64 bytes that bypass the caches (AVX-512F).
    pub has_avx512: bool,
}

/// The result as bits, or 0 before it is known.
static CACHED: AtomicU8 = AtomicU8::new(0);
/// Bit: the result is known.
const IS_KNOWN: u8 = 1;
const HAS_CRC32C: u8 = 2;
const HAS_AVX: u8 = 4;
const HAS_AVX512: u8 = 8;

/// Returns what this processor has. Detects it at the first call, unless [`store_processor`] was called before.
#[inline]
pub fn processor() -> Processor {
    let bits = CACHED.load(Ordering::Relaxed);
    if bits == 0 {
        return detect();
    }
    Processor {
        has_crc32c: bits & HAS_CRC32C != 0,
        has_avx: bits & HAS_AVX != 0,
        has_avx512: bits & HAS_AVX512 != 0,
    }
}

/// Stores what this processor has. The caller must have checked that the system saves the registers of these
/// instructions.
pub fn store_processor(processor: Processor) {
    let mut bits = IS_KNOWN;
    if processor.has_crc32c {
        bits |= HAS_CRC32C;
    }
    if processor.has_avx {
        bits |= HAS_AVX;
    }
    if processor.has_avx512 {
        bits |= HAS_AVX512;
    }
    CACHED.store(bits, Ordering::Relaxed);
}

/// Detects what this processor has, and stores it.
#[cold]
fn detect() -> Processor {
    #[cfg(target_arch = "x86_64")]
    let processor = Processor {
        has_crc32c: std::arch::is_x86_feature_detected!("sse4.2"),
        has_avx: std::arch::is_x86_feature_detected!("avx"),
        has_avx512: std::arch::is_x86_feature_detected!("avx512f"),
    };
    #[cfg(not(target_arch = "x86_64"))]
    let processor = Processor::default();
    store_processor(processor);
    processor
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_noted_is_answered_and_what_was_asked_is_so_again() {
        let asked = detect();
        for bits in 0..8 {
            let noted = Processor {
                has_crc32c: bits & 1 != 0,
                has_avx: bits & 2 != 0,
                has_avx512: bits & 4 != 0,
            };
            // Notes only instructions that the processor has, because other tests of this process may use them
            // meanwhile.
            let noted = Processor {
                has_crc32c: noted.has_crc32c && asked.has_crc32c,
                has_avx: noted.has_avx && asked.has_avx,
                has_avx512: noted.has_avx512 && asked.has_avx512,
            };
            store_processor(noted);
            assert_eq!(processor(), noted);
        }
        assert_eq!(detect(), asked);
        assert_eq!(processor(), asked);
    }
}
