//! The byte region in which a journal, a log of metadata records, is stored.

/// A byte region that outlives the process, or a substitute for one in tests.
pub trait Medium: Send {
    /// Returns the length of the region, which has two equal halves.
    fn len(&self) -> usize;
    /// Returns whether the region has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Stores `bytes` at `offset`. A later process sees stores in the order in which they were made. A store of 8
    /// aligned bytes is atomic.
    fn write(&mut self, offset: usize, bytes: &[u8]);
    /// Reads bytes from `offset`.
    fn read(&self, offset: usize, bytes: &mut [u8]);
    /// Allocates memory for a range, which may be written only after that. Returns false, and changes nothing, if there
    /// is no memory.
    fn reserve(&mut self, offset: usize, len: usize) -> bool;
    /// Frees the memory of a range, which reads as zeros from now on. A crash during the call may zero only a first
    /// part of the range.
    fn release(&mut self, offset: usize, len: usize);
    /// Returns a length after which all bytes of the range are zero: the end of the last stored data, or more.
    fn data_len(&self, offset: usize, len: usize) -> usize;
}

/// A region in ordinary memory, for tests and tools.
#[derive(Clone, Debug)]
pub struct Memory(pub Vec<u8>);

impl Medium for Memory {
    fn len(&self) -> usize {
        self.0.len()
    }

    fn write(&mut self, offset: usize, bytes: &[u8]) {
        self.0[offset..offset + bytes.len()].copy_from_slice(bytes);
    }

    fn read(&self, offset: usize, bytes: &mut [u8]) {
        bytes.copy_from_slice(&self.0[offset..offset + bytes.len()]);
    }

    fn reserve(&mut self, _offset: usize, _len: usize) -> bool {
        true
    }

    fn release(&mut self, offset: usize, len: usize) {
        self.0[offset..offset + len].fill(0);
    }

    fn data_len(&self, _offset: usize, len: usize) -> usize {
        // An upper bound is enough.
        len
    }
}
