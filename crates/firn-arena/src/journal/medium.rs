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
    /// Gives the range memory: only then may it be written. False where there is none; nothing changed then.
    fn reserve(&mut self, at: usize, len: usize) -> bool;
    /// The range reads as zeros from now on, and its memory goes back. The zeros come from the front.
    fn release(&mut self, at: usize, len: usize);
    /// Bytes of the range up to the last one that was stored, or more: behind them is nothing but zeros.
    fn used(&self, at: usize, len: usize) -> usize;
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
    fn reserve(&mut self, _at: usize, _len: usize) -> bool {
        true
    }
    fn release(&mut self, at: usize, len: usize) {
        self.0[at..at + len].fill(0);
    }
    fn used(&self, _at: usize, len: usize) -> usize {
        len
    }
}
