//! Takes the features of the processor from the C library, so that Firn need not query the processor again.
//!
//! glibc queries the processor when a program starts, to choose its own memcpy. Since version 2.33 it makes the
//! result available (`<sys/platform/x86.h>`). With other C libraries, [`firn_format::processor`] queries the
//! processor at the first use.

/// Takes over the result of the C library. The function looks up a symbol, so it must not run in a signal handler.
pub fn take_from_c_library() {
    #[cfg(target_arch = "x86_64")]
    if let Some(processor) = x86::known_to_c_library() {
        firn_format::processor::store_processor(processor);
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::ffi::c_uint;

    use firn_format::processor::Processor;

    /// glibc's `struct cpuid_feature`: EAX, EBX, ECX and EDX of a leaf of CPUID.
    ///
    /// `cpuid` has the features of the processor. `usable` has those that programs can use: the system must support
    /// them, and GLIBC_TUNABLES must not disable them.
    #[repr(C)]
    struct Leaf {
        cpuid: [c_uint; 4],
        usable: [c_uint; 4],
    }

    /// Type of the function of glibc that returns a leaf.
    type GetLeaf = unsafe extern "C" fn(c_uint) -> *const Leaf;

    /// glibc's indexes of the leaves (`CPUID_INDEX_1`, `CPUID_INDEX_7`).
    const LEAF_1: c_uint = 0;
    const LEAF_7: c_uint = 1;
    /// Indexes of the registers in a [`Leaf`].
    const EBX: usize = 1;
    const ECX: usize = 2;
    /// Bits of the features in these registers. SSE4.2 has the instruction for CRC-32C.
    const SSE4_2: c_uint = 1 << 20;
    const AVX: c_uint = 1 << 28;
    const AVX512F: c_uint = 1 << 16;

    /// Returns the features of the processor that glibc has found. Returns `None` if the C library does not make them
    /// available.
    pub(super) fn known_to_c_library() -> Option<Processor> {
        // SAFETY: the name is a C string.
        let symbol =
            unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"__x86_get_cpuid_feature_leaf".as_ptr()) };
        if symbol.is_null() {
            return None;
        }
        // SAFETY: only glibc has a function of this name, and it has this type.
        let get_leaf: GetLeaf = unsafe { std::mem::transmute(symbol) };
        let usable_registers = |leaf: c_uint| {
            // SAFETY: the function accepts any number. The leaf that it returns never changes; for an unknown number it
            // is all zeros.
            unsafe { get_leaf(leaf).as_ref() }.map(|leaf| leaf.usable)
        };
        let leaf_1 = usable_registers(LEAF_1)?;
        let leaf_7 = usable_registers(LEAF_7)?;
        Some(Processor {
            has_crc32c: leaf_1[ECX] & SSE4_2 != 0,
            has_avx: leaf_1[ECX] & AVX != 0,
            has_avx512: leaf_7[EBX] & AVX512F != 0,
        })
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use firn_format::processor::Processor;

    #[test]
    fn the_c_library_knows_what_the_processor_says() {
        let asked = Processor {
            has_crc32c: std::arch::is_x86_feature_detected!("sse4.2"),
            has_avx: std::arch::is_x86_feature_detected!("avx"),
            has_avx512: std::arch::is_x86_feature_detected!("avx512f"),
        };
        // Other C libraries, and older versions of glibc, return no result.
        let known = super::x86::known_to_c_library();
        assert!(
            known.is_none_or(|known| known == asked),
            "{known:?} {asked:?}"
        );
    }
}
