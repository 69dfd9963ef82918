//! Truncations that the kernel has not heard the end of.
//!
//! A page that the kernel reads into its cache is filled with zeros where the answer is short. While it waits for the
//! answer to a truncation it believes the old length: a reader would see zeros that were never written. So a short
//! answer to a read through the cache is held until the truncation that is under way is answered.
//!
//! Promises
//! * No thread waits here.
//! * A held answer is given when the last truncation of its file that was under way is over, whatever became of it.

use std::collections::HashMap;
use std::sync::Arc;

use firn_engine::InodeId;
use parking_lot::Mutex;

type Answer = Box<dyn FnOnce() + Send>;

/// Truncations under way.
#[derive(Default)]
pub(crate) struct Truncations {
    by_inode: Mutex<HashMap<InodeId, UnderWay>>,
}

#[derive(Default)]
struct UnderWay {
    count: usize,
    held: Vec<Answer>,
}

/// A truncation under way. Dropped after its answer.
pub(crate) struct Truncation {
    all: Arc<Truncations>,
    inode: InodeId,
}

impl Truncations {
    pub(crate) fn begin(self: &Arc<Self>, inode: InodeId) -> Truncation {
        self.by_inode.lock().entry(inode).or_default().count += 1;
        Truncation {
            all: Arc::clone(self),
            inode,
        }
    }

    /// Gives a short answer, once no truncation of the file is under way.
    pub(crate) fn answer_after(&self, inode: InodeId, answer: Answer) {
        let now = {
            let mut by_inode = self.by_inode.lock();
            match by_inode.get_mut(&inode) {
                Some(under_way) => {
                    under_way.held.push(answer);
                    None
                }
                None => Some(answer),
            }
        };
        if let Some(answer) = now {
            answer();
        }
    }
}

impl Drop for Truncation {
    fn drop(&mut self) {
        let over = {
            let mut by_inode = self.all.by_inode.lock();
            let Some(under_way) = by_inode.get_mut(&self.inode) else {
                return;
            };
            under_way.count -= 1;
            match under_way.count {
                0 => by_inode.remove(&self.inode),
                _ => None,
            }
        };
        for answer in over.into_iter().flat_map(|over| over.held) {
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
