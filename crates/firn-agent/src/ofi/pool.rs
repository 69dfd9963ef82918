//! Memory that bytes may arrive in, and what may be exposed.

use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::mm::{MapFlags, ProtFlags};

/// Memory of this process.
///
/// # Safety
/// `start` is the first of `bytes` bytes that are mapped for as long as the value lives, wherever it is moved to.
pub unsafe trait Memory: Send + Sync {
    /// Its first byte.
    fn start(&self) -> *const u8;
    /// How many there are.
    fn bytes(&self) -> usize;
}

/// A mapping that is cut into buffers of one size. Its pages are taken when they are first written to.
pub struct Pool {
    start: NonNull<u8>,
    buffer_bytes: usize,
    buffers: usize,
}

// SAFETY: memory that belongs to the value; nothing of it is used without a `Buffer`, of which each part has one.
unsafe impl Send for Pool {}
// SAFETY: as above; shared, it only tells where it is.
unsafe impl Sync for Pool {}

impl Pool {
    /// Makes a pool of `buffers` buffers.
    pub fn create(buffers: usize, buffer_bytes: usize) -> std::io::Result<Vec<Buffer>> {
        let bytes = buffers * buffer_bytes;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice.
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

// SAFETY: mapped in `create` and unmapped when it is dropped.
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
        // SAFETY: made in `create`; each buffer has a share of the pool, so there is none any more.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.bytes()) };
    }
}

/// A part of a [`Pool`], with one owner.
pub struct Buffer {
    pool: Arc<Pool>,
    index: usize,
}

impl Buffer {
    /// The pool of the buffer.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// Its place among the buffers of its pool.
    pub fn index(&self) -> usize {
        self.index
    }

    fn start(&self) -> *mut u8 {
        // SAFETY: `index` is one of the pool's buffers, so the place is within its mapping.
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
        // SAFETY: `buffer_bytes` mapped bytes, which the kernel began as zeros. `create` makes one value for each index
        // and nothing copies it, so a borrow is the only one.
        unsafe { std::slice::from_raw_parts(self.start(), self.pool.buffer_bytes) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; borrowed for writing.
        unsafe { std::slice::from_raw_parts_mut(self.start(), self.pool.buffer_bytes) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_apart_and_outlive_one_another() {
        let mut buffers = Pool::create(5, 4096).unwrap();
        for (key, buffer) in buffers.iter_mut().enumerate() {
            assert_eq!(buffer.len(), 4096);
            assert!(buffer.iter().all(|byte| *byte == 0));
            buffer.fill(key as u8 + 1);
        }
        let last = buffers.pop().unwrap();
        for (key, buffer) in buffers.iter().enumerate() {
            assert!(buffer.iter().all(|byte| usize::from(*byte) == key + 1));
        }
        drop(buffers);
        assert!(last.iter().all(|byte| *byte == 5));
        assert_eq!(last.pool().bytes(), 5 * 4096);
    }
}
