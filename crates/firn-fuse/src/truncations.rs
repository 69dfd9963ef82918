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
    files: Mutex<HashMap<InodeId, FileTruncations>>,
}

/// Truncations under way of one file, and the answers that wait for their end.
#[derive(Default)]
struct FileTruncations {
    count: usize,
    delayed_answers: Vec<Answer>,
}

/// One truncation under way. It is dropped after its answer was sent.
pub(crate) struct Truncation {
    truncations: Arc<Truncations>,
    inode: InodeId,
}

impl Truncations {
    /// Begins a truncation of a file.
    pub(crate) fn begin(self: &Arc<Self>, inode: InodeId) -> Truncation {
        self.files.lock().entry(inode).or_default().count += 1;
        Truncation {
            truncations: Arc::clone(self),
            inode,
        }
    }

    /// Sends a short answer: at once, or after the last truncation of the file that is under way.
    pub(crate) fn answer_after_truncations(&self, inode: InodeId, answer: Answer) {
        let mut files = self.files.lock();
        if let Some(file) = files.get_mut(&inode) {
            file.delayed_answers.push(answer);
            return;
        }
        // The answer is sent without the lock.
        drop(files);
        answer();
    }
}

impl Drop for Truncation {
    /// Ends the truncation. If no other truncation of the file is under way, sends the answers to reads that were
    /// delayed until now.
    fn drop(&mut self) {
        let mut files = self.truncations.files.lock();
        let Some(file) = files.get_mut(&self.inode) else {
            return;
        };
        file.count -= 1;
        if file.count > 0 {
            return;
        }
        let ended = files.remove(&self.inode);
        // The answers are sent without the lock.
        drop(files);
        for answer in ended.into_iter().flat_map(|file| file.delayed_answers) {
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
            truncations.answer_after_truncations(InodeId(inode), Box::new(answer));
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
