//! Delays short answers to reads while a truncation of the file is under way.
//!
//! The kernel uses the old length of a file until it gets the answer to a truncation. If a read of a page into its
//! cache gets a short answer before that, the kernel fills the rest of the page with zeros. A reader would see zeros
//! that no program wrote. So a short answer waits until the truncation is answered.
//!
//! Promises
//! * No thread waits here.
//! * A delayed answer is sent when the last truncation of its file ends, whether or not the truncation succeeded.

use std::collections::HashMap;
use std::sync::Arc;

use firn_engine::InodeId;
use parking_lot::Mutex;

type Answer = Box<dyn FnOnce() + Send>;

/// The truncations under way on a mount.
#[derive(Default)]
pub(crate) struct Truncations {
    by_inode: Mutex<HashMap<InodeId, UnderWay>>,
}

/// Truncations under way of one file, and the answers that wait for their end.
#[derive(Default)]
struct UnderWay {
    count: usize,
    held: Vec<Answer>,
}

/// One truncation under way. It is dropped after its answer was sent.
pub(crate) struct Truncation {
    truncations: Arc<Truncations>,
    inode: InodeId,
}

impl Truncations {
    /// Begins a truncation of a file.
    pub(crate) fn begin(self: &Arc<Self>, inode: InodeId) -> Truncation {
        self.by_inode.lock().entry(inode).or_default().count += 1;
        Truncation {
            truncations: Arc::clone(self),
            inode,
        }
    }

    /// Sends a short answer: at once, or after the last truncation of the file that is under way.
    pub(crate) fn answer_after(&self, inode: InodeId, answer: Answer) {
        let answer_now = {
            let mut by_inode = self.by_inode.lock();
            match by_inode.get_mut(&inode) {
                Some(under_way) => {
                    under_way.held.push(answer);
                    None
                }
                None => Some(answer),
            }
        };
        if let Some(answer) = answer_now {
            answer();
        }
    }
}

impl Drop for Truncation {
    fn drop(&mut self) {
        let ended = {
            let mut by_inode = self.truncations.by_inode.lock();
            let Some(under_way) = by_inode.get_mut(&self.inode) else {
                return;
            };
            under_way.count -= 1;
            if under_way.count == 0 {
                by_inode.remove(&self.inode)
            } else {
                None
            }
        };
        for answer in ended.into_iter().flat_map(|ended| ended.held) {
            answer();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    #[test]
    fn answers_are_held_until_the_last_truncation_of_their_file_is_over() {
        let truncations = Arc::new(Truncations::default());
        let given = Arc::new(AtomicU64::new(0));
        let ask = |inode| {
            let given = Arc::clone(&given);
            let answer = move || {
                given.fetch_add(1, Ordering::Relaxed);
            };
            truncations.answer_after(InodeId(inode), Box::new(answer));
        };
        let count = || given.load(Ordering::Relaxed);
        ask(1);
        assert_eq!(count(), 1, "none is under way");
        let first = truncations.begin(InodeId(1));
        let second = truncations.begin(InodeId(1));
        ask(2);
        assert_eq!(count(), 2, "another file");
        ask(1);
        ask(1);
        drop(first);
        assert_eq!(count(), 2);
        drop(second);
        assert_eq!(count(), 4);
        ask(1);
        assert_eq!(count(), 5);
    }
}
