//! What this processor can do, asked once.
//!
//! The standard library asks the processor itself, with a dozen CPUID instructions. In a virtual machine each of them
//! is a trip to the host, 4 to 7 µs, which a process would wait for at its first write by direct access. A caller that
//! knows the answers already gives them before ([`note_processor`]).

use std::sync::atomic::{AtomicU8, Ordering};

/// Instructions that are used where they are there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Processor {
    /// CRC32C of a word (SSE4.2).
    pub has_crc32c: bool,
    /// Stores of 32 bytes past the caches (AVX).
    pub has_avx: bool,
    /// Stores of 64 bytes past the caches (AVX-512F).
    pub has_avx512: bool,
}

/// The answers, as bits; 0: not asked yet.
static KNOWN: AtomicU8 = AtomicU8::new(0);
const ASKED: u8 = 1;

/// This processor. Asks it at the first call, unless the caller of [`note_processor`] knew.
#[inline]
pub fn processor() -> Processor {
    let known = KNOWN.load(Ordering::Relaxed);
    if known == 0 {
        return ask_processor();
    }
    Processor {
        has_crc32c: known & 2 != 0,
        has_avx: known & 4 != 0,
        has_avx512: known & 8 != 0,
    }
}

/// Notes what this processor can do, where that is known, and that the system saves its registers.
pub fn note_processor(processor: Processor) {
    let bits = [
        processor.has_crc32c,
        processor.has_avx,
        processor.has_avx512,
    ];
    let bits = (1..).zip(bits).map(|(bit, has)| u8::from(has) << bit);
    KNOWN.store(bits.fold(ASKED, |all, bit| all | bit), Ordering::Relaxed);
}

#[cold]
fn ask_processor() -> Processor {
    #[cfg(target_arch = "x86_64")]
    let processor = Processor {
        has_crc32c: std::arch::is_x86_feature_detected!("sse4.2"),
        has_avx: std::arch::is_x86_feature_detected!("avx"),
        has_avx512: std::arch::is_x86_feature_detected!("avx512f"),
    };
    #[cfg(not(target_arch = "x86_64"))]
    let processor = Processor::default();
    note_processor(processor);
    processor
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_noted_is_answered_and_what_was_asked_is_so_again() {
        let asked = ask_processor();
        for bits in 0..8 {
            let noted = Processor {
                has_crc32c: bits & 1 != 0,
                has_avx: bits & 2 != 0,
                has_avx512: bits & 4 != 0,
            };
            // Fewer instructions than there are: other tests of this process may use them meanwhile.
            let noted = Processor {
                has_crc32c: noted.has_crc32c && asked.has_crc32c,
                has_avx: noted.has_avx && asked.has_avx,
                has_avx512: noted.has_avx512 && asked.has_avx512,
            };
            note_processor(noted);
            assert_eq!(processor(), noted);
        }
        assert_eq!(ask_processor(), asked);
        assert_eq!(processor(), asked);
    }
}
