//! Copies into the arena: past the caches where the bytes are many.
//!
//! A slab is read next by a drain, not by the writer, and glibc's memcpy never chooses non-temporal stores
//! on machines with a large last cache (docs/PERFORMANCE.md).

use std::ptr;

/// From here on stores that leave the caches alone win.
const STREAM_BYTES_MIN: usize = 256 << 10;

/// Copies `len` bytes. When it returns, a Release store publishes them, however they were stored.
///
/// # Safety
/// As for [`ptr::copy_nonoverlapping`].
pub unsafe fn copy(to: *mut u8, from: *const u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    if len >= STREAM_BYTES_MIN {
        // The answers are kept in a static word after the first question; no allocation, no lock.
        if std::arch::is_x86_feature_detected!("avx512f") {
            // SAFETY: the caller's promise, and the processor has it.
            return unsafe { stream(to, from, len, 64, avx512) };
        }
        if std::arch::is_x86_feature_detected!("avx2") {
            // SAFETY: as above.
            return unsafe { stream(to, from, len, 32, avx2) };
        }
    }
    // SAFETY: the caller's promise.
    unsafe { ptr::copy_nonoverlapping(from, to, len) }
}

/// Copies the ends plainly and what is aligned between them by `body`, `step` bytes at a time.
///
/// # Safety
/// As for [`copy`]; the processor has what `body` needs.
#[cfg(target_arch = "x86_64")]
unsafe fn stream(
    to: *mut u8,
    from: *const u8,
    len: usize,
    step: usize,
    body: unsafe fn(*mut u8, *const u8, usize),
) {
    let head = to.align_offset(step).min(len);
    let middle = (len - head) / (4 * step) * (4 * step);
    let done = head + middle;
    // SAFETY: the three parts lie within `len` bytes; the middle is aligned to `step`.
    unsafe {
        ptr::copy_nonoverlapping(from, to, head);
        body(to.add(head), from.add(head), middle);
        // Weakly ordered stores: without this a later Release store could be seen before them.
        std::arch::x86_64::_mm_sfence();
        ptr::copy_nonoverlapping(from.add(done), to.add(done), len - done);
    }
}

/// # Safety
/// AVX-512F; `to` is aligned to 64, `len` is a multiple of 256.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn avx512(to: *mut u8, from: *const u8, len: usize) {
    use std::arch::x86_64::{_mm512_loadu_si512, _mm512_stream_si512};
    let mut at = 0;
    while at < len {
        // SAFETY: four vectors within `len` bytes.
        unsafe {
            let from = from.add(at);
            let a = _mm512_loadu_si512(from.cast());
            let b = _mm512_loadu_si512(from.add(64).cast());
            let c = _mm512_loadu_si512(from.add(128).cast());
            let d = _mm512_loadu_si512(from.add(192).cast());
            let to = to.add(at);
            _mm512_stream_si512(to.cast(), a);
            _mm512_stream_si512(to.add(64).cast(), b);
            _mm512_stream_si512(to.add(128).cast(), c);
            _mm512_stream_si512(to.add(192).cast(), d);
        }
        at += 256;
    }
}

/// # Safety
/// AVX2; `to` is aligned to 32, `len` is a multiple of 128.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn avx2(to: *mut u8, from: *const u8, len: usize) {
    use std::arch::x86_64::{_mm256_loadu_si256, _mm256_stream_si256};
    let mut at = 0;
    while at < len {
        // SAFETY: four vectors within `len` bytes.
        unsafe {
            let from = from.add(at);
            let a = _mm256_loadu_si256(from.cast());
            let b = _mm256_loadu_si256(from.add(32).cast());
            let c = _mm256_loadu_si256(from.add(64).cast());
            let d = _mm256_loadu_si256(from.add(96).cast());
            let to = to.add(at);
            _mm256_stream_si256(to.cast(), a);
            _mm256_stream_si256(to.add(32).cast(), b);
            _mm256_stream_si256(to.add(64).cast(), c);
            _mm256_stream_si256(to.add(96).cast(), d);
        }
        at += 128;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_alignment_and_length_is_copied_and_nothing_beside_it() {
        let source: Vec<u8> = (0..STREAM_BYTES_MIN * 2 + 999).map(|i| (i * 31 % 251) as u8).collect();
        for (shift, extra) in [(0, 0), (1, 1), (7, 63), (31, 255), (33, 256), (63, 257), (64, 998)] {
            for len in [0, 1, 63, 4096, STREAM_BYTES_MIN - 1, STREAM_BYTES_MIN + extra] {
                let mut target = vec![0xeeu8; len + 200];
                // SAFETY: both ranges are within their vectors.
                unsafe { copy(target.as_mut_ptr().add(shift), source.as_ptr().add(extra % 5), len) };
                assert!(target[..shift].iter().all(|b| *b == 0xee));
                assert_eq!(target[shift..shift + len], source[extra % 5..][..len]);
                assert!(target[shift + len..].iter().all(|b| *b == 0xee));
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn each_kind_of_stream_copies_the_same() {
        let source: Vec<u8> = (0..100_000).map(|i| (i * 7 % 253) as u8).collect();
        for (has, step, body) in [
            (std::arch::is_x86_feature_detected!("avx512f"), 64, avx512 as unsafe fn(_, _, _)),
            (std::arch::is_x86_feature_detected!("avx2"), 32, avx2),
        ] {
            let mut target = vec![0u8; source.len()];
            if has {
                // SAFETY: the ranges are whole vectors, and the processor has it.
                unsafe { stream(target.as_mut_ptr(), source.as_ptr(), source.len(), step, body) };
                assert_eq!(target, source);
            }
        }
    }
}
