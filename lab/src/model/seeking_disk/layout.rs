//! Where files lie on the disk: in windows that they reserve as their writes come.
//!
//! The disk has no end, and nothing is stored here: a file that grows after its close may share a place with another.

use std::collections::HashMap;

use super::Run;

/// What a close rounds up to: a block of the file system.
const BLOCK_BYTES: u64 = 4096;

#[derive(Debug, Default)]
pub(super) struct Layout {
    window_bytes: u64,
    /// First byte that is not reserved.
    free: u64,
    /// By file, and number of the window in it.
    windows: HashMap<(u64, u64), Window>,
    /// The window that an open file reserved last.
    last_window: HashMap<u64, u64>,
}

#[derive(Debug)]
struct Window {
    position: u64,
    /// Bytes from its start that were ever written.
    used: u64,
}

impl Layout {
    pub(super) fn new(window_bytes: u64) -> Self {
        Self {
            window_bytes,
            ..Self::default()
        }
    }

    /// Where a range of a file lies; reserves what it has no place for yet.
    pub(super) fn place(&mut self, file: u64, offset: u64, len: u64) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::new();
        let end = offset + len;
        let mut from = offset;
        while from < end {
            let within = from % self.window_bytes;
            let len = (end - from).min(self.window_bytes - within);
            let window = self.window(file, from / self.window_bytes);
            window.used = window.used.max(within + len);
            let position = window.position + within;
            match runs.last_mut() {
                Some(last) if last.end() == position => last.len += len,
                _ => runs.push(Run { position, len }),
            }
            from += len;
        }
        runs
    }

    fn window(&mut self, file: u64, number: u64) -> &mut Window {
        let free = &mut self.free;
        self.windows.entry((file, number)).or_insert_with(|| {
            let position = *free;
            *free += self.window_bytes;
            self.last_window.insert(file, number);
            Window { position, used: 0 }
        })
    }

    /// Gives back what the file reserved last and did not use, if no later reservation lies behind it.
    pub(super) fn close(&mut self, file: u64) {
        let Some(number) = self.last_window.remove(&file) else {
            return;
        };
        let window = &self.windows[&(file, number)];
        if window.position + self.window_bytes == self.free {
            self.free = window.position + window.used.next_multiple_of(BLOCK_BYTES);
        }
    }
}
