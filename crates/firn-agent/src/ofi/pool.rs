//! Memory for libfabric (RDMA): pools of buffers into which this host reads, and the trait of memory that other hosts
//! may read (*exposed* memory).

use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::mm::{MapFlags, ProtFlags};

/// Mapped memory of this process.
///
/// # Safety
/// `start` must point to the first of `bytes` mapped bytes. They must stay mapped at that address as long as the value
/// lives, even if the value is moved.
pub unsafe trait Memory: Send + Sync {
    /// Address of the first byte.
    fn start(&self) -> *const u8;
    /// Number of bytes.
    fn bytes(&self) -> usize;
}

/// An anonymous mapping, divided into buffers of equal size. The kernel allocates a page at the first write to it.
pub struct Pool {
    start: NonNull<u8>,
    buffer_bytes: usize,
    buffers: usize,
}

// SAFETY: the mapping belongs to this value, and each part of it is accessed only by its single `Buffer`.
unsafe impl Send for Pool {}
// SAFETY: a shared pool only returns addresses and sizes.
unsafe impl Sync for Pool {}

impl Pool {
    /// Maps a pool, and returns its buffers. Each has `buffer_bytes` zeros.
    pub fn create(buffers: usize, buffer_bytes: usize) -> std::io::Result<Vec<Buffer>> {
        let bytes = buffers * buffer_bytes;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses the address of a new mapping, so no other memory is affected.
        let start = unsafe {
            rustix::mm::mmap_anonymous(std::ptr::null_mut(), bytes, protection, MapFlags::PRIVATE)
        }?;
        let pool = Arc::new(Self {
            start: NonNull::new(start.cast()).expect("the kernel maps no null"),
            buffer_bytes,
            buffers,
        });
        let buffer = |index| Buffer {
            pool: Arc::clone(&pool),
            index,
        };
        Ok((0..buffers).map(buffer).collect())
    }
}

// SAFETY: the memory is mapped in `create` and unmapped when the value is dropped.
unsafe impl Memory for Pool {
    fn start(&self) -> *const u8 {
        self.start.as_ptr()
    }

    fn bytes(&self) -> usize {
        self.buffers * self.buffer_bytes
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: `create` has mapped it. Each buffer shares the ownership of the pool, so no buffer is left.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.bytes()) };
    }
}

/// A part of a [`Pool`], with a single owner.
pub struct Buffer {
    pool: Arc<Pool>,
    index: usize,
}

impl Buffer {
    /// The pool of the buffer.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// Index among the buffers of the pool.
    pub fn index(&self) -> usize {
        self.index
    }

    fn start(&self) -> *mut u8 {
        // SAFETY: `index` is less than the number of buffers, so the address is within the mapping.
        unsafe {
            self.pool
                .start
                .as_ptr()
                .add(self.index * self.pool.buffer_bytes)
        }
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the range has `buffer_bytes` mapped bytes, which the kernel has initialized with zeros. `create`
        // makes a single value for each index, so this borrow of it is the only access.
        unsafe { std::slice::from_raw_parts(self.start(), self.pool.buffer_bytes) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and the value is borrowed for writing.
        unsafe { std::slice::from_raw_parts_mut(self.start(), self.pool.buffer_bytes) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_do_not_overlap_and_outlive_one_another() {
        let mut buffers = Pool::create(5, 4096).unwrap();
        for (index, buffer) in buffers.iter_mut().enumerate() {
            assert_eq!(buffer.len(), 4096);
            assert!(buffer.iter().all(|byte| *byte == 0));
            buffer.fill(index as u8 + 1);
        }
        let last = buffers.pop().unwrap();
        for (index, buffer) in buffers.iter().enumerate() {
            assert!(buffer.iter().all(|byte| usize::from(*byte) == index + 1));
        }
        drop(buffers);
        assert!(last.iter().all(|byte| *byte == 5));
        assert_eq!(last.pool().bytes(), 5 * 4096);
    }
}
