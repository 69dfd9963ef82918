//! Copies bytes into the arena, the memory that clients share with firnd. Large copies bypass the CPU caches.
//!
//! The next reader of a written range is the drain, which copies it to a file, and not the writer. So caching is of no
//! use. On machines with a large last-level cache, glibc's memcpy never chooses non-temporal stores
//! (docs/PERFORMANCE.md).

use std::ptr;

/// Minimum size in bytes of a copy with non-temporal stores. If the source is in a cache, such stores reach 30 GiB/s,
/// and ordinary ones 16. Shorter copies would gain too, but their bytes may be read again soon.
const STREAM_BYTES_MIN: usize = 64 << 10;

/// Copies `len` bytes. A Release store after the call publishes the bytes, whichever kind of store was used.
///
/// # Safety
/// The promises of [`ptr::copy_nonoverlapping`] must hold.
#[inline(always)]
pub unsafe fn copy(to: *mut u8, from: *const u8, len: usize) {
    // SAFETY: the caller keeps the promises of this function.
    unsafe {
        if len < STREAM_BYTES_MIN {
            ptr::copy_nonoverlapping(from, to, len)
        } else {
            copy_large(to, from, len)
        }
    }
}

/// Copies a large range, with non-temporal stores if the processor has them.
///
/// # Safety
/// The promises of [`copy`] must hold.
#[inline(never)]
unsafe fn copy_large(to: *mut u8, from: *const u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        let processor = firn_format::processor::processor();
        if processor.has_avx512 {
            // SAFETY: the caller keeps the promises of this function, and the processor has AVX-512F.
            return unsafe { copy_past_caches(to, from, len, AVX512_VECTOR_BYTES, avx512) };
        }
        if processor.has_avx {
            // SAFETY: the caller keeps the promises of this function, and the processor has AVX.
            return unsafe { copy_past_caches(to, from, len, AVX_VECTOR_BYTES, avx) };
        }
    }
    // SAFETY: the caller promises that the ranges are readable, writable and do not overlap.
    unsafe { ptr::copy_nonoverlapping(from, to, len) }
}

/// Sizes of a vector register with AVX-512 and with AVX.
#[cfg(target_arch = "x86_64")]
const AVX512_VECTOR_BYTES: usize = 64;
#[cfg(target_arch = "x86_64")]
const AVX_VECTOR_BYTES: usize = 32;

/// Number of vectors that a `copy_vectors` of [`copy_past_caches`] copies at a time.
#[cfg(target_arch = "x86_64")]
const VECTORS_PER_BLOCK: usize = 4;

/// Copies the unaligned ends with ordinary stores, and the aligned part between them with `copy_vectors`, which uses
/// non-temporal stores.
///
/// # Safety
/// The promises of [`copy`] must hold, and the processor must have the features that `copy_vectors` needs.
#[cfg(target_arch = "x86_64")]
unsafe fn copy_past_caches(
    to: *mut u8,
    from: *const u8,
    len: usize,
    vector_bytes: usize,
    copy_vectors: unsafe fn(*mut u8, *const u8, usize),
) {
    let block_bytes = VECTORS_PER_BLOCK * vector_bytes;
    let aligned_start = to.align_offset(vector_bytes).min(len);
    let aligned_bytes = (len - aligned_start) / block_bytes * block_bytes;
    let tail_start = aligned_start + aligned_bytes;
    // SAFETY: the three parts lie within `len` bytes; the middle one is aligned to a vector.
    unsafe {
        ptr::copy_nonoverlapping(from, to, aligned_start);
        copy_vectors(
            to.add(aligned_start),
            from.add(aligned_start),
            aligned_bytes,
        );
        // Non-temporal stores are weakly ordered. Without this fence, a later Release store could become visible
        // before them.
        std::arch::x86_64::_mm_sfence();
        ptr::copy_nonoverlapping(from.add(tail_start), to.add(tail_start), len - tail_start);
    }
}

/// Distance in bytes between a load and the prefetch of the source. The processor's own prefetcher stops at the end
/// of a page. With this prefetch, a source outside all caches is read at 21 instead of 18 GiB/s.
#[cfg(target_arch = "x86_64")]
const PREFETCH_DISTANCE_BYTES: usize = 2 << 10;

/// Defines a `copy_vectors` of [`copy_past_caches`] that copies four vectors at a time. A prefetch never faults, so it
/// may reach beyond the source.
#[cfg(target_arch = "x86_64")]
macro_rules! define_copy_vectors {
    ($(#[$doc:meta])* $name:ident, $feature:literal, $bytes:literal, $load:ident, $store:ident) => {
        $(#[$doc])*
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = $feature)]
        unsafe fn $name(to: *mut u8, from: *const u8, len: usize) {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch, $load, $store};
            let mut offset = 0;
            while offset < len {
                for line in (0..4 * $bytes).step_by(64) {
                    _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(offset + PREFETCH_DISTANCE_BYTES + line).cast());
                }
                // SAFETY: `len` is a multiple of four vectors, so these end within the `len` bytes that are promised.
                unsafe {
                    let from = from.add(offset);
                    let a = $load(from.cast());
                    let b = $load(from.add($bytes).cast());
                    let c = $load(from.add(2 * $bytes).cast());
                    let d = $load(from.add(3 * $bytes).cast());
                    let to = to.add(offset);
                    $store(to.cast(), a);
                    $store(to.add($bytes).cast(), b);
                    $store(to.add(2 * $bytes).cast(), c);
                    $store(to.add(3 * $bytes).cast(), d);
                }
                offset += 4 * $bytes;
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
define_copy_vectors! {
    /// # Safety
    /// The processor must have AVX-512F. `to` must be aligned to 64, and `len` a multiple of 256.
    avx512, "avx512f", 64, _mm512_loadu_si512, _mm512_stream_si512
}

#[cfg(target_arch = "x86_64")]
define_copy_vectors! {
    /// # Safety
    /// The processor must have AVX. `to` must be aligned to 32, and `len` a multiple of 128.
    avx, "avx", 32, _mm256_loadu_si256, _mm256_stream_si256
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_alignment_and_length_is_copied_and_nothing_beside_it() {
        let source: Vec<u8> = (0..STREAM_BYTES_MIN * 2 + 999)
            .map(|i| (i * 31 % 251) as u8)
            .collect();
        for (shift, extra) in [
            (0, 0),
            (1, 1),
            (7, 63),
            (31, 255),
            (33, 256),
            (63, 257),
            (64, 998),
        ] {
            for len in [
                0,
                1,
                63,
                4096,
                STREAM_BYTES_MIN - 1,
                STREAM_BYTES_MIN + extra,
            ] {
                let mut target = vec![0xeeu8; len + 200];
                // SAFETY: both ranges are within their vectors.
                unsafe {
                    copy(
                        target.as_mut_ptr().add(shift),
                        source.as_ptr().add(extra % 5),
                        len,
                    )
                };
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
            (
                std::arch::is_x86_feature_detected!("avx512f"),
                64,
                avx512 as unsafe fn(_, _, _),
            ),
            (std::arch::is_x86_feature_detected!("avx"), 32, avx),
        ] {
            let mut target = vec![0u8; source.len()];
            if has {
                // SAFETY: the ranges are whole vectors, and the processor has the instructions of `body`.
                unsafe {
                    copy_past_caches(
                        target.as_mut_ptr(),
                        source.as_ptr(),
                        source.len(),
                        step,
                        body,
                    )
                };
                assert_eq!(target, source);
            }
        }
    }
}
