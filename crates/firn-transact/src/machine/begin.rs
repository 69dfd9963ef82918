//! Steps of a begin request: `Clear`, `Begin`, `Create`.
//!
//! `Clear` deals with the last commit of the directory before the new transaction begins. A commit is *decided* before
//! it is *applied* to the backing, the directory below the mount. Data is *pending* while it is in memory only.
//!
//! | last commit | action |
//! |---|---|
//! | applied, or none | none |
//! | decided in this mount, data written after it is pending | the commit is applied first |
//! | decided in this mount, no data is pending | none; the new transaction follows the commit |
//! | decided by an earlier firnd (server of the mount), or a failed restore | it is applied; programs then see it |

use std::sync::Arc;

use firn_backing::Backing;
use firn_protocol::path::BytePath;

use super::{Answer, Event, Machine, Mount, Pending, Step};
use crate::error::TransactionError;
use crate::object::Object;
use crate::paths::parent_of;
use crate::transaction::handle::{Decided, QuiesceTarget, ScopeTransactions};
use crate::transaction::top::TopMaker;

impl<'a, B: Backing, M: Mount<B>> Machine<'a, B, M> {
    /// Applies the last decided commit of the directory at `path` to the backing, if it must be applied before the next
    /// transaction begins. Returns the step `Begin`. There are two cases:
    /// * An earlier firnd (server of this mount) decided the commit.
    /// * Data that was written after the commit is in memory only.
    pub(super) fn finish_blocking_commit(
        &self,
        path: Vec<u8>,
        transactions: ScopeTransactions<'a, B>,
    ) -> Result<Step<'a, B>, TransactionError> {
        let mut target = transactions.quiesce_target(&path);
        match transactions.commit {
            Some(commit) if commit.is_recovered() => {
                self.apply_recovered(&commit, &path)?;
                // Programs have looked up the old tree's objects. The begin must look the directory up by its path
                // again.
                target = QuiesceTarget::for_directory(&path);
            }
            // The pending data was written after the commit and is not part of the new transaction. It cannot drain
            // before the commit is applied.
            Some(commit) if !self.mount.is_drained(&target.path_now()) => self.apply(&commit)?,
            Some(_) | None => {}
        }
        Ok(Step::Begin {
            target,
            path,
            then: Box::new(Step::Over(Answer::Done)),
        })
    }

    /// Applies a commit of an earlier firnd, and makes the kernel forget the old tree that programs saw until now.
    pub(super) fn apply_recovered(
        &self,
        commit: &Decided<'a, B>,
        path: &[u8],
    ) -> Result<(), TransactionError> {
        let path_after = commit.path_after();
        self.apply(commit)?;
        self.mount.forget_names(&[path, &path_after]);
        Ok(())
    }

    /// Begins a transaction of the directory at `path`, and returns the step `then`. Meanwhile no program changes
    /// `target`, the same directory, and its data in memory is written to the backing first.
    ///
    /// Waits while other hosts have not finished an earlier transaction.
    pub(super) fn begin(
        &self,
        target: &QuiesceTarget<'a, B>,
        path: &[u8],
        then: Step<'a, B>,
    ) -> Result<Step<'a, B>, TransactionError> {
        self.retry_while_hosts_finish(|| {
            self.mount.quiesce(target, Pending::Drain, |root| {
                self.begin_in_quiet_scope(root, path)?;
                if self.store.tests_conflicts() {
                    self.mount.begin_accesses(path);
                }
                Ok(())
            })
        })?;
        Ok(then)
    }

    /// Begins a transaction in a scope that the caller has quiesced.
    pub(super) fn begin_in_quiet_scope(
        &self,
        root: &Arc<Object<B>>,
        path: &[u8],
    ) -> Result<(), TransactionError> {
        self.store.begin(root, path)?;
        self.mount.note(Event::Begin, path, None);
        Ok(())
    }

    /// Begins a transaction that creates the directory at `path`; returns the final step. `maker` is the client, with
    /// the mode of the new directory.
    ///
    /// The client's rights are checked last, as mkdir(2) does. By then the parent is known to be in no transaction, so
    /// its mode and owner are not those of an uncommitted change.
    pub(super) fn create(
        &self,
        path: &[u8],
        maker: TopMaker<'_>,
    ) -> Result<Step<'a, B>, TransactionError> {
        let parent_path = parent_of(path);
        let parent_error = |error| TransactionError::Parent {
            path: BytePath::from(parent_path),
            error: Box::new(error),
        };
        // The parent may be the uppermost directory of another transaction, which the backing does not show yet.
        let parent = match self.store.top_overlay.top_at_path(parent_path) {
            Some(top) => top,
            None => self.mount.directory_at(parent_path).map_err(parent_error)?,
        };
        self.store.can_begin_created(&parent, path)?;
        if let Err(errno) = self.mount.must_be_writable(parent_path) {
            return Err(TransactionError::NotWritable {
                path: BytePath::from(parent_path),
                errno,
            });
        }
        self.store.begin_created(&parent, path, maker)?;
        self.mount.note(Event::Begin, path, None);
        self.mount.forget_directory(parent_path);
        Ok(Step::Over(Answer::Done))
    }
}
