//! The bytes under a journal.

/// A byte region that outlives the process, or stands in for one.
pub trait Medium: Send {
    /// Bytes in all; two equal halves.
    fn len(&self) -> usize;
    /// Whether there is nothing.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Stores `bytes` at `at`. Stores become visible to a later process in the order they were made;
    /// one of 8 aligned bytes is never torn.
    fn write(&mut self, at: usize, bytes: &[u8]);
    /// Reads into `bytes` from `at`.
    fn read(&self, at: usize, bytes: &mut [u8]);
}

/// A region in ordinary memory, for tests and tools.
#[derive(Clone, Debug)]
pub struct Memory(pub Vec<u8>);

impl Medium for Memory {
    fn len(&self) -> usize {
        self.0.len()
    }
    fn write(&mut self, at: usize, bytes: &[u8]) {
        self.0[at..at + bytes.len()].copy_from_slice(bytes);
    }
    fn read(&self, at: usize, bytes: &mut [u8]) {
        bytes.copy_from_slice(&self.0[at..at + bytes.len()]);
    }
}
